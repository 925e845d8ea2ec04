"""Speech tokens to audio: chunks of many streams in one batch, or a whole utterance.

The engine owns the networks and the caches that belong to voices; the caller owns each stream's `Stream`, passes it to
every `step` and drops it at the end.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import stacks
from common.accel.loading import flow_runtime, use_runtime
from common.config import FlowRuntime
from common.constants import EULER_STEPS, FLOW_CHUNK_TOKENS, LOOKAHEAD_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from common.errors import UnavailableError
from common.flow.checkpoint import load_dit_flow, load_unet_flow
from common.hift.checkpoint import load_hift
from common.token2wav.dit.streaming import DiTStreaming, VoiceCache
from common.token2wav.hift.overlap import hamming_window
from common.token2wav.hift.streaming import MelChunk, StreamingVocoder, VocoderState
from common.token2wav.noise import flow_noise, source_noise
from common.token2wav.streaming import Chunk, FlowState, StreamingFlow, Voice
from common.token2wav.unet.streaming import UNetStreaming
from common.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENT_MEL = -11.5  # log of the least magnitude that a mel shows


@dataclass(frozen=True)
class Precision:
    """What the flow, and HiFT between its source and its spectrum, compute in."""

    flow: torch.dtype
    vocoder: torch.dtype

    @classmethod
    def named(cls, flow: str, vocoder: str, device: str, runtime: FlowRuntime = "auto") -> "Precision":
        """Names of torch's dtypes; "auto" is what docs/accelerators.md found fastest without harm to the audio: float16
        on a GPU; on a CPU float32 but for a flow in torch, which computes in bfloat16 where the CPU has it.

        runtime: of the flow's estimator, as the setting names it.
        """
        on_gpu = torch.device(device).type == "cuda"
        auto_flow = auto_vocoder = torch.float16 if on_gpu else torch.float32
        if not on_gpu and flow_runtime(runtime, device) == "torch" and _multiplies_bfloat16():
            auto_flow = torch.bfloat16
        precision = cls(_dtype(flow, auto_flow), _dtype(vocoder, auto_vocoder))
        logger.info("the flow computes in %s, HiFT in %s", precision.flow, precision.vocoder)
        return precision


def _dtype(name: str, auto: torch.dtype) -> torch.dtype:
    return auto if name == "auto" else getattr(torch, name)


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it. Others convert every value, which takes longer than float32."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


@dataclass
class Stream:
    """Everything that one live stream owns. Dropping it frees it."""

    flow: FlowState
    vocoder: VocoderState


class Token2Wav:
    """A flow and a vocoder. Not thread-safe: one thread renders."""

    def __init__(self, flow: StreamingFlow, vocoder: StreamingVocoder, device: torch.device | str = "cpu"):
        self._flow = flow
        self._vocoder = vocoder
        self._device = device

    @classmethod
    def load_unet(
        cls,
        model_dir: str | Path,
        *,
        device: str,
        max_streams: int,
        precision: Precision,
        runtime: FlowRuntime = "auto",
        steps: int = EULER_STEPS,
    ) -> "Token2Wav":
        """CosyVoice2's networks: flow.pt and hift.pt of `model_dir`, and the runtime's own files.

        runtime: of the flow's estimator. "torch" on a GPU is without any CUDA graph: nothing is captured at the start
        and most of the memory stays free, which suits whole utterances.
        """
        _use(device)
        network = load_unet_flow(Path(model_dir) / "flow.pt", device, precision.flow)
        runtime = flow_runtime(runtime, device)
        use_runtime(network, stacks.UNET, runtime, model_dir, device=device, max_streams=max_streams)
        graphs = runtime != "torch"
        flow = UNetStreaming(network, flow_noise(device), steps=steps, graphs=graphs)
        return cls(flow, _load_vocoder(model_dir, device, max_streams, precision, graphs), device)

    @classmethod
    def load_dit(
        cls,
        model_dir: str | Path,
        *,
        device: str,
        max_streams: int,
        voice_cache_bytes: int,
        precision: Precision,
        runtime: FlowRuntime = "auto",
        steps: int = EULER_STEPS,
    ) -> "Token2Wav":
        """Step-Audio2's networks; as `load_unet`."""
        _use(device)
        network = load_dit_flow(Path(model_dir) / "flow.pt", device, precision.flow)
        runtime = flow_runtime(runtime, device)
        use_runtime(network, stacks.DIT, runtime, model_dir, device=device, max_streams=max_streams)
        noise, voices, graphs = flow_noise(device), VoiceCache(voice_cache_bytes), runtime != "torch"
        flow = DiTStreaming(network, noise, voices, max_streams=max_streams, steps=steps, graphs=graphs)
        return cls(flow, _load_vocoder(model_dir, device, max_streams, precision, graphs), device)

    def warm_up(self) -> None:
        """Speak once to nobody: what is set up at first use is set up, and a checkpoint that cannot speak is found."""
        _use(self._device)
        tokens = np.arange(FLOW_CHUNK_TOKENS)
        mel = np.full((TOKEN_MEL_RATIO * FLOW_CHUNK_TOKENS, MEL_BINS), SILENT_MEL, np.float32)
        prompt = Prompt(tokens, mel, np.ones(self._flow.speaker_dim, np.float32), text="")
        stream = self.open(prompt)
        self.step([(stream, Chunk(tokens, last=False))])
        self.close(stream)
        self.whole(prompt, tokens)

    @torch.inference_mode()
    def open(self, prompt: Prompt) -> Stream:
        """Start a stream in a voice; builds the voice's caches if they are not there yet."""
        flow = self._flow.open(self._voice(prompt))
        try:
            return Stream(flow, self._vocoder.open())
        except UnavailableError:
            self._flow.close(flow)
            raise

    @property
    def batch_tokens(self) -> int:
        """How many tokens a batch should have at most, counted as `tokens` does."""
        return self._flow.batch_tokens

    @property
    def cache_bytes(self) -> int:
        """Memory that the streams and voices take."""
        return self._flow.cache_bytes + self._vocoder.pool.nbytes

    @property
    def contexts(self) -> tuple[int, float]:
        """Contexts of the flow's runtime, and how many seconds were waited for one; 0 where nothing waits."""
        return self._flow.contexts

    def tokens(self, stream: Stream, chunk: Chunk) -> int:
        """How many tokens are computed for `chunk`. Raises ValueError if it does not continue its stream."""
        return self._flow.tokens(stream.flow, chunk)

    def close(self, stream: Stream) -> None:
        """Free what the stream holds. To be called once."""
        self._flow.close(stream.flow)
        self._vocoder.close(stream.vocoder)

    @torch.inference_mode()
    def step(self, batch: Sequence[tuple[Stream, Chunk]]) -> list[np.ndarray | ValueError]:
        """The audio that each chunk adds to its stream, float32 (N,) at 24 kHz; empty while it is withheld.

        Streams of a batch differ, and none hears another. A chunk that does not continue its stream gets a ValueError
        in its place, and the rest is rendered.
        """
        results: list[np.ndarray | ValueError] = []
        accepted = []
        for index, (stream, chunk) in enumerate(batch):
            results.append(np.zeros(0, np.float32))
            try:
                self._check(chunk.tokens)
                self._flow.new_tokens(stream.flow, chunk)
                accepted.append(index)
            except ValueError as error:
                results[index] = error
        mels = self._flow.render([(batch[index][0].flow, batch[index][1]) for index in accepted])
        chunks = [
            MelChunk(batch[index][0].vocoder, mel, batch[index][1].last)
            for index, mel in zip(accepted, mels, strict=True)
        ]
        for index, audio in zip(accepted, self._vocoder.step(chunks), strict=True):
            results[index] = audio.numpy()
        return results

    def whole(self, prompt: Prompt, tokens: np.ndarray, speed: float = 1.0) -> np.ndarray:
        """A whole utterance at once (full attention, no chunks), float32 (N,) at 24 kHz.

        speed: its mel is stretched to 1 / speed of its length, as CosyVoice2 does, which keeps the pitch.
        """
        (audio,) = self.whole_batch([(prompt, tokens)], speed)
        return audio

    @torch.inference_mode()
    def whole_batch(self, utterances: Sequence[tuple[Prompt, np.ndarray]], speed: float = 1.0) -> list[np.ndarray]:
        """Whole utterances together, each as `whole` renders it alone. One that cannot be spoken is a ValueError for
        all of them.
        """
        for _, tokens in utterances:
            self._check(tokens)
            if len(tokens) == 0:
                raise ValueError("target_speech_tokens is empty: there is nothing to speak")
        mels = self._flow.whole([(self._voice(prompt), tokens) for prompt, tokens in utterances])
        if speed != 1.0:
            mels = [F.interpolate(mel[None], size=max(1, int(mel.shape[1] / speed)), mode="linear")[0] for mel in mels]
        return [audio.numpy() for audio in self._vocoder.whole(mels)]

    def _check(self, tokens: np.ndarray) -> None:
        bad = tokens[(tokens < 0) | (tokens >= self._flow.vocab_size)]
        if len(bad):
            raise ValueError(f"speech token {bad[0]} is outside 0..{self._flow.vocab_size - 1}")

    def _voice(self, prompt: Prompt) -> Voice:
        self._check(prompt.tokens)
        if len(prompt.tokens) < LOOKAHEAD_TOKENS:
            raise ValueError(f"the prompt has {len(prompt.tokens)} speech tokens; it needs {LOOKAHEAD_TOKENS} or more")
        return Voice(
            tokens=torch.from_numpy(prompt.tokens).to(self._device, torch.int64)[None],
            mel=torch.from_numpy(prompt.mel).to(self._device)[None],
            embedding=torch.from_numpy(prompt.embedding).to(self._device)[None],
        )


def _use(device: torch.device | str) -> None:
    """Kernels of this thread run on that GPU, if it names one."""
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)


def _load_vocoder(
    model_dir: str | Path, device: str, max_streams: int, precision: Precision, graphs: bool
) -> StreamingVocoder:
    hift = load_hift(Path(model_dir) / "hift.pt", device).body_to(precision.vocoder)
    noise = source_noise(hift.config.harmonics + 1, device)
    return StreamingVocoder(hift, noise, hamming_window(), max_streams=max_streams, graphs=graphs)
