"""What the offline tools share: options, samples, what the options load, how their process is set up, and a run over
samples: the times of its stages and the samples that failed."""

import argparse
import asyncio
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.batches import isolated
from cosyvoice_triton.checkpoint import read_state
from cosyvoice_triton.config import FlowRuntime, OrchestratorConfig, SpeakerRuntime, Token2WavConfig
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import has_random_weights
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample, read_dataset, read_manifest
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.text.cleaning import clean_line
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.voice.audio import save_audio
from cosyvoice_triton.voice.prompt import Prompt, Recording, validate_reference

FAILURES_SHOWN = 20


def add_data_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """Add options that select the samples. split: upstream's name for this tool's option of a data set's split."""
    parser.add_argument("--manifest-path", type=Path, help="JSON lines or seed-tts .lst; default: ten sentences")
    parser.add_argument(split, dest="split_name", help="split of a HuggingFace data set, such as wenetspeech4tts")
    parser.add_argument(
        "--dataset-name",
        help="default: yuekai/CV3-Eval for splits with 'zero' in their name, else yuekai/seed_tts_cosy2",
    )


def add_trt_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-trt",
        action="store_true",
        help="run the flow's estimator and the speaker encoder from their TensorRT plans (docs/gpu.md), on a GPU",
    )


def read_samples(args: argparse.Namespace) -> list[Sample]:
    """Return the samples that the options select. Raise ValueError if they cannot be read."""
    if args.manifest_path and (args.split_name or args.dataset_name):
        raise ValueError("give a manifest or a data set, not both")
    if args.dataset_name and not args.split_name:
        raise ValueError(f"which split of {args.dataset_name}? name it")
    if args.split_name:
        name = args.dataset_name or ("yuekai/CV3-Eval" if "zero" in args.split_name else "yuekai/seed_tts_cosy2")
        found = read_dataset(name, args.split_name)
    else:
        found = read_manifest(args.manifest_path or samples.MANIFEST)
    if nameless := [sample.id for sample in found if sample.prompt_audio is None]:
        raise ValueError(f"sample {nameless[0]!r} names a speaker; offline tools need prompt_audio")
    return found


def recording_of(sample: Sample) -> Recording:
    """Return the sample's recording and transcript. ValueError if one of them cannot be used."""
    recording = sample.prompt_audio
    assert recording is not None  # checked by `read_samples`
    validate_reference(recording.wav, rate=recording.rate)
    text = clean_line(sample.prompt_text, name="prompt_text", max_chars=OrchestratorConfig.max_text_chars)
    return replace(recording, text=text)


class SampleRun:
    """Samples on their way to audio files. It is valid after an interruption, too.

    seconds: of each stage, those in which at least one sample was in it: stages of different samples overlap.
    failures: id, stage and error of each sample that has no audio.
    """

    def __init__(self, stages: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: dict[str, list[tuple[float, float]]] = {stage: [] for stage in stages}
        self.begun = clock()
        self.audio_seconds = 0.0
        self.failures: list[dict[str, str]] = []

    @contextmanager
    def sample(self, sample: Sample) -> Iterator[Callable[[str], None]]:
        """Yield what a sample calls when it enters a stage, with "" when it only leaves the one before. An error of the
        block is recorded as why the sample has no audio."""
        stage, begun = "", 0.0

        def enter(name: str) -> None:
            nonlocal stage, begun
            now = self._clock()
            if stage:
                self._spans[stage].append((begun, now))
            stage, begun = name, now

        try:
            yield enter
        except Exception as error:
            reason = " ".join(str(error).split())
            if not isinstance(error, (ValueError, UnavailableError, OSError)):
                reason = f"{type(error).__name__}: {reason}"  # out of memory, or a bug
            self.failures.append({"id": sample.id, "stage": stage, "error": reason})
        finally:
            enter("")

    def save(self, path: Path, audio: np.ndarray) -> None:
        """Write audio (N,) float32."""
        save_audio(path, audio, SAMPLE_RATE)
        self.audio_seconds += len(audio) / SAMPLE_RATE

    @property
    def seconds(self) -> dict[str, float]:
        return {stage: _covered(spans) for stage, spans in self._spans.items()}

    def figures(self, total: float | None = None) -> dict[str, Any]:
        """Return `<stage>_time_seconds` and `<stage>_rtf` per stage and for the pipeline, as in upstream's figures; the
        RTF is None without audio. total: seconds of the pipeline; by default those since construction."""
        figures: dict[str, Any] = {}
        total = self._clock() - self.begun if total is None else total
        for stage, seconds in {**self.seconds, "pipeline": total}.items():
            figures[f"{stage}_time_seconds"] = seconds
            figures[f"{stage}_rtf"] = seconds / self.audio_seconds if self.audio_seconds else None
        return figures

    def report(self, path: Path, **about: Any) -> dict[str, Any]:
        """Write the figures, what the run is about and the failures as JSON, and return them; print a table of the
        stages and, on standard error, the first failures."""
        figures = {**about, **self.figures(), "failures": self.failures}
        path.write_text(json.dumps(figures, indent=4, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        names = (*self._spans, "pipeline")
        rows = [(name, figures[f"{name}_time_seconds"], figures[f"{name}_rtf"]) for name in names]
        print(table(("stage", "seconds", "RTF"), rows))
        for failure in self.failures[:FAILURES_SHOWN]:
            print("failed: {id} ({stage}): {error}".format(**failure), file=sys.stderr)
        if hidden := self.failures[FAILURES_SHOWN:]:
            print(f"failed: {len(hidden)} more, all in {path.name}", file=sys.stderr)
        return figures


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of what the spans, beginnings and ends, cover together."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def set_up() -> None:
    """Show warnings as plain lines; let torch use one thread, unless OMP_NUM_THREADS is set."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if "OMP_NUM_THREADS" not in os.environ:
        # The LLM has threads of its own: torch's would wait for cores that those keep busy, ten times as long.
        torch.set_num_threads(1)


def stack_of(model_dir: Path) -> Stack:
    """Return the stack whose token2wav checkpoint is there. ValueError if it is none's."""
    path = model_dir / Stack.flow
    return stacks.of_flow(read_state(path, "meta"), path)


def described(stack: Stack, model_dir: Path) -> str:
    """Return the vocoder's name in the figures, which says so if its weights are random."""
    return f"{stack.name} token2wav{', RANDOM weights' if has_random_weights(model_dir) else ''}"


def token2wav_config(args: argparse.Namespace, model_dir: Path, runtime: FlowRuntime, streams: int) -> Token2WavConfig:
    """Return the settings of token2wav in this process. runtime: of its estimator, unless --enable-trt names plans."""
    return Token2WavConfig(
        model_dir=str(model_dir),
        device=args.device,
        flow_runtime="tensorrt" if args.enable_trt else runtime,
        max_streams=streams,
        first_hop_tokens=FLOW_CHUNK_TOKENS,
    )


def speaker_runtime(args: argparse.Namespace) -> SpeakerRuntime:
    return "tensorrt" if args.enable_trt else "onnxruntime"


@dataclass
class _Utterance:
    """Speech tokens (n,) in a voice, and what they have become: audio (N,) float32, or why there is none."""

    prompt: Prompt
    tokens: np.ndarray
    result: np.ndarray | Exception | None = None


class WholeToken2Wav:
    """The pipeline's port to a token2wav that renders whole utterances only, in batches: without streams or admission.

    calls: forward calls of the flow so far.
    """

    def __init__(self, stack: Stack, config: Token2WavConfig, batch_size: int) -> None:
        self._engine = Token2Wav.from_config(stack, config)
        self._engine.warm_up()
        self._batch_size = batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token2wav")
        self._waiting: list[_Utterance] = []
        self._turn = asyncio.Lock()
        self.calls = 0

    def open(self, speed: float = 1.0) -> NoReturn:
        """Raise ValueError: it has no streams."""
        raise ValueError("the offline tools' token2wav renders whole utterances only")

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float = 1.0) -> np.ndarray:
        """Return audio (N,) float32 of a whole utterance, at the usual rate."""
        mine = _Utterance(prompt, np.asarray(tokens, np.int64))
        self._waiting.append(mine)
        async with self._turn:  # the others wait, and are in its batches
            await asyncio.sleep(0)  # in which those come that are as far
            while mine.result is None:
                await self._render()
        if isinstance(mine.result, Exception):
            raise mine.result
        return mine.result

    def close(self) -> None:
        self._thread.shutdown()

    async def _render(self) -> None:
        """Render a batch of what waits, the shortest first: every row of a batch costs as much as its longest one."""
        self._waiting.sort(key=lambda each: len(each.tokens))
        batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        loop, results = asyncio.get_running_loop(), list[Any]()
        try:
            results += await loop.run_in_executor(self._thread, isolated, self._rendered, batch)
        except asyncio.CancelledError:  # whoever's turn it was does not wait any more, but the others do
            self._waiting += batch
            raise
        except Exception as error:  # which every later batch has, too
            results += [error] * len(batch)
        for each, result in zip(batch, results, strict=True):
            each.result = result

    def _rendered(self, batch: Sequence[_Utterance]) -> list[np.ndarray]:
        self.calls += 1
        return self._engine.whole_batch([(each.prompt, each.tokens) for each in batch])
