"""Audio to evaluate: sentences by a teacher, by a part of the networks, or by the whole server."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from cosyvoice_triton.client.grpc_client import AsyncConnection
from cosyvoice_triton.client.requests import Parameters, Recorder, Utterance
from cosyvoice_triton.constants import HOP_SAMPLES, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.networks.hift import load_hift
from cosyvoice_triton.offline.rendering import OfflineToken2Wav
from cosyvoice_triton.voice import audio
from cosyvoice_triton.voice.encoders import AudioTokenizer, reference_mel
from cosyvoice_triton.voice.prompt import Prompt, Recording

TIMEOUT = 120.0


@dataclass(frozen=True)
class Take:
    """One sentence spoken once.

    waveform: float32 (N,); first_chunk, total: seconds, if timed.
    """

    text: str
    waveform: np.ndarray = field(repr=False)
    rate: int = SAMPLE_RATE
    first_chunk: float | None = None
    total: float | None = None

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.rate


@dataclass(frozen=True)
class Series:
    """All sentences by one system in one voice. stack: "" for a system that is of no stack."""

    system: str
    stack: str
    voice: str
    takes: Sequence[Take]

    @property
    def name(self) -> str:
        """Name of a folder for it."""
        return "-".join(re.sub(r"\W+", "_", part) for part in (self.system, self.stack, self.voice) if part)


def read_teacher(directory: Path, voice: str, sentences: Sequence[str]) -> Series:
    """DIRECTORY/VOICE/NN.wav, NN the sentence's number from 00. OSError or RuntimeError if one cannot be read."""
    paths = [directory / voice / f"{number:02d}.wav" for number in range(len(sentences))]
    waves = [audio.load_audio(path, PROMPT_SAMPLE_RATE) for path in paths]
    takes = [Take(text, wave, PROMPT_SAMPLE_RATE) for text, wave in zip(sentences, waves, strict=True)]
    return Series("teacher", "", voice, takes)


def copy_synthesis(model_dir: Path, teacher: Series, stack: str) -> Series:
    """The teacher's mel through our vocoder: the loss of quality by the vocoder alone."""
    hift = load_hift(model_dir / "hift.pt")
    takes = []
    for take in teacher.takes:
        mel = torch.from_numpy(reference_mel(Recording(take.waveform, rate=take.rate)).T)[None]  # (T, 80) -> (1, 80, T)
        shape = (1, mel.shape[2] * HOP_SAMPLES, hift.config.harmonics + 1)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            takes.append(Take(take.text, hift(mel, noise)[0].reshape(-1).numpy()))
    return Series("copy synthesis", stack, teacher.voice, takes)


def from_tokens(model_dir: Path, teacher: Series, prompt: Prompt, stack: str) -> Series:
    """The teacher's speech tokens through flow and vocoder: everything except the LLM."""
    tokenizer, token2wav = AudioTokenizer(model_dir), OfflineToken2Wav.load(model_dir, "cpu", streams=0)
    takes = []
    for take in teacher.takes:
        (rendered,) = token2wav.whole([(prompt, tokenizer([take.waveform])[0])])
        if isinstance(rendered, Exception):
            raise rendered
        takes.append(Take(take.text, rendered))
    return Series("tokens to audio", stack, teacher.voice, takes)


async def _request_takes(server: str, model: str, mode: str, requests: Sequence[Utterance]) -> list[Take]:
    takes = []
    async with AsyncConnection(server) as connection:
        # Warm-up, not timed: the first request of a voice encodes its recording.
        await connection.record(model, requests[0], mode, TIMEOUT, Recorder())
        for request in requests:
            recorder = Recorder()
            await connection.record(model, request, mode, TIMEOUT, recorder)
            speech = recorder.finish()
            waveform = speech.waveform.astype(np.float32)
            takes.append(Take(request.target_text, waveform, SAMPLE_RATE, speech.first_chunk, speech.total))
    return takes


def request_takes(server: str, model: str, mode: str, requests: Sequence[Utterance]) -> list[Take]:
    """Send the requests one after another, each alone on the server. Raises ClientError."""
    return asyncio.run(_request_takes(server, model, mode, requests))


def seeded(number: int) -> Parameters:
    """The server's default sampling, with a fixed seed."""
    return {"seed": number}
