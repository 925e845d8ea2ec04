"""Times of words as the speech service estimates them, compared with a forced alignment by pocketsphinx.

    python -m demo_voice.evaluation.alignment --output out/alignment

The real tritonserver speaks every sentence in each voice, streamed; pocketsphinx, which is given the words, aligns them
with its own English model. Prints and writes how far the beginnings of words are apart, in milliseconds. A sentence
that it cannot align is counted. The recordings and the times of both are written, too.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.client.grpc_client import AsyncConnection, chunks
from cosyvoice_triton.client.requests import AudioPart, Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.server.rendering import StackOptions, render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer
from cosyvoice_triton.speech_service.audio.word_times import word_times
from cosyvoice_triton.voice import audio

from demo_voice.evaluation import HELD_OUT
from demo_voice.evaluation.recognition import PEAK, words
from demo_voice.evaluation.takes import TIMEOUT, seeded

Times = list[tuple[str, float]]  # words in lower case, and where each begins in seconds


class Aligner:
    """English, with pocketsphinx's own model and dictionary."""

    def __init__(self) -> None:
        from pocketsphinx import Decoder  # here, so that programs explain themselves without the tests' packages

        self._decoder = Decoder(samprate=PROMPT_SAMPLE_RATE, loglevel="FATAL", lm=None)

    def align(self, text: str, waveform: np.ndarray) -> Times | None:
        """The words of `text` in `waveform` (N,) float32 at SAMPLE_RATE; None if they cannot be aligned."""
        said = words(text)
        if any(self._decoder.lookup_word(word) is None for word in said):
            return None
        wave = audio.resample(torch.from_numpy(waveform), SAMPLE_RATE, PROMPT_SAMPLE_RATE).numpy()
        wave = wave * (PEAK / max(1e-4, np.abs(wave).max()))
        self._decoder.set_align_text(" ".join(said))
        self._decoder.start_utt()
        self._decoder.process_raw((wave * 32767).astype(np.int16).tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = [(each.word, each.start_frame / 100) for each in self._decoder.seg() or ()]
        found = [(word.partition("(")[0], start) for word, start in found if word[0] not in "<[+"]
        return found if [word for word, _ in found] == said else None


async def _spoken(address: str, model: str, requests: Sequence[Utterance]) -> list[list[AudioPart]]:
    answers = []
    async with AsyncConnection(address) as connection:
        for request in requests:
            answers.append([part async for part in chunks(connection.client, model, request, TIMEOUT)])
    return answers


def estimated(text: str, waveform: np.ndarray) -> Times | None:
    """The same by the speech service's estimate."""
    times = [(words(text[word.begin : word.end]), word.start) for word in word_times(text, waveform)]
    return [(each[0], start) for each, start in times] if all(len(each) == 1 for each, _ in times) else None


def errors(estimate: Times, aligned: Times) -> np.ndarray:
    """Milliseconds by which each word begins later in the estimate."""
    return 1000 * np.array([one[1] - other[1] for one, other in zip(estimate, aligned, strict=True)])


def summary(found: Sequence[np.ndarray]) -> str:
    away = np.abs(np.concatenate(list(found)))
    quantiles = ", ".join(f"{name} {np.quantile(away, at):.0f} ms" for name, at in (("median", 0.5), ("p90", 0.9)))
    return f"{len(found)} sentences, {len(away)} words: {quantiles}, max {away.max():.0f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=Path("models/demo"), help="as cosyvoice_triton.demo_checkpoint.make writes it"
    )
    parser.add_argument("--sentences", type=Path, default=HELD_OUT, help="one per line")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name)
    parser.add_argument("--voices", nargs="+", default=("slt", "rms"), help="names in the folder voices of the models")
    parser.add_argument("--output", type=Path, default=Path("out/alignment"))
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    sentences = args.sentences.read_text(encoding="utf-8").splitlines()
    options = StackOptions(models_dir=args.models, stack=args.stack, device="cpu")
    try:
        render(options, args.output / "repository")
        aligner, log = Aligner(), args.output / "tritonserver.log"
        with TritonServer(args.output / "repository", ports=Ports(0, 0, 0), log_file=log) as server:
            spoken = {
                voice: asyncio.run(
                    _spoken(
                        server.grpc_url,
                        options.orchestrator,
                        [
                            Utterance(text, speaker=voice, parameters={**seeded(number), "segments": True})
                            for number, text in enumerate(sentences)
                        ],
                    )
                )
                for voice in args.voices
            }
        every: list[np.ndarray] = []
        for voice, answers in spoken.items():
            found, written = [], []
            for number, parts in enumerate(answers):
                waveform = np.concatenate([part.waveform for part in parts])
                audio.save_audio(args.output / f"{voice}-{number:02d}.wav", waveform, SAMPLE_RATE)
                [(text, samples), *more] = [segment for part in parts for segment in part.segments]
                if more or samples != waveform.size:
                    raise ValueError(f"the sentence {sentences[number][:80]!r} is not one segment: use shorter ones")
                estimate, aligned = estimated(text, waveform), aligner.align(text, waveform)
                written.append({"text": text, "estimate": estimate, "aligned": aligned})
                if estimate is not None and aligned is not None:
                    found.append(errors(estimate, aligned))
            (args.output / f"{voice}.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
            if not found:
                raise ValueError(f"no sentence of {args.sentences} could be aligned: its words must be English ones")
            print(f"{voice}: {summary(found)}; not aligned: {len(answers) - len(found)}")
            every += found
        print(f"together: {summary(every)}. {os.cpu_count()} CPU cores.")
    except (ValueError, RuntimeError, OSError, ImportError) as error:  # ServerError is a RuntimeError
        print(f"voice_evaluation.alignment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
