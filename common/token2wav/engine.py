"""Speech tokens to audio: chunks of many streams in one batch, or a whole utterance.

The engine owns the networks and the prompt caches of voices. The caller owns each `Stream`: it opens it, makes its
chunks and closes it.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.accel.loading import flow_runtime
from common.batches import isolated
from common.config import FlowRuntime, Token2WavConfig
from common.constants import EULER_STEPS, FLOW_CHUNK_TOKENS, LOOKAHEAD_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from common.process import faults
from common.stacks import Stack
from common.token2wav.limits import BatchLimits
from common.token2wav.stream import Chunk, Stream
from common.token2wav.streaming import FlowOptions, StreamingFlow, Vocoder, VocoderOptions
from common.voice.prompt import Prompt

logger = logging.getLogger(__name__)

NOT_FINITE = "the rendered audio is not finite"
SILENT_MEL = -11.5  # log of the smallest magnitude in a mel


@dataclass(frozen=True)
class Precision:
    """Number formats of the flow, and of HiFT between its source and its spectrum."""

    flow: torch.dtype
    vocoder: torch.dtype

    @classmethod
    def named(cls, flow: str, vocoder: str, device: str, runtime: FlowRuntime = "auto") -> "Precision":
        """From names of torch's dtypes. "auto" is the fastest that does not harm the audio (docs/accelerators.md):
        float16 on a GPU; on a CPU float32, except for a flow in torch, which uses bfloat16 if the CPU supports it.

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
    """Whether this CPU has bfloat16 instructions. Without them every value is converted: slower than float32."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


class Token2Wav:
    """A flow and a vocoder. Not thread-safe: one thread renders."""

    def __init__(self, flow: StreamingFlow, vocoder: Vocoder, device: torch.device | str = "cpu"):
        self._flow = flow
        self._vocoder = vocoder
        self._device = device
        self._bad_chunk: Chunk | None = None

    @classmethod
    def load(
        cls,
        stack: Stack,
        model_dir: str | Path,
        *,
        device: str,
        limits: BatchLimits,
        precision: Precision,
        runtime: FlowRuntime = "auto",
        steps: int = EULER_STEPS,
        prompt_cache_bytes: int = Token2WavConfig.voice_cache_mb << 20,
        contexts: int = Token2WavConfig.flow_contexts,
    ) -> "Token2Wav":
        """The networks of a stack from its checkpoint directory, and the runtime's own files.

        runtime: of the flow's estimator. "torch" on a GPU captures no CUDA graphs: start-up is fast and most of the
        memory stays free, which suits whole utterances. contexts: execution contexts of each TensorRT plan.
        """
        _use(device)
        runtime = flow_runtime(runtime, device)
        options = FlowOptions(
            stack=stack,
            device=device,
            dtype=precision.flow,
            runtime=runtime,
            steps=steps,
            limits=limits,
            prompt_cache_bytes=prompt_cache_bytes,
            contexts=contexts,
        )
        flow: StreamingFlow = _function(stack.loader)(Path(model_dir) / stack.flow, options)
        if flow.cumulative != stack.cumulative:
            raise ValueError(f"stack {stack.name!r} has cumulative {stack.cumulative}, its flow {flow.cumulative}")
        vocoder: Vocoder = _function(stack.vocoder_loader)(
            Path(model_dir) / stack.hift,
            VocoderOptions(device=device, dtype=precision.vocoder, limits=limits, graphs=options.graphs),
        )
        return cls(flow, vocoder, device)

    @classmethod
    def from_config(cls, stack: Stack, config: Token2WavConfig) -> "Token2Wav":
        """As the Triton model is configured."""
        limits = BatchLimits(
            max_streams=config.max_streams,
            first_hop_tokens=config.first_hop_tokens,
            max_hop_tokens=config.max_hop_tokens,
            chunk_boundary=stack.chunk_boundary,
            batch_memory_mb=config.batch_memory_mb,
        )
        names = config.flow_precision, config.vocoder_precision
        return cls.load(
            stack,
            config.model_dir,
            device=config.device,
            limits=limits,
            precision=Precision.named(*names, config.device, config.flow_runtime),
            runtime=config.flow_runtime,
            steps=config.n_timesteps,
            prompt_cache_bytes=config.voice_cache_mb << 20,
            contexts=config.flow_contexts,
        )

    def warm_up(self) -> None:
        """Render a dummy utterance: initialises what is set up at first use and finds a checkpoint that cannot run."""
        _use(self._device)
        prompt, tokens = self.sample(FLOW_CHUNK_TOKENS)
        stream = self.open(prompt)
        self.step([self.chunk(stream, tokens, final=False)])
        self.close(stream)
        self.whole(prompt, tokens)

    def sample(self, tokens: int = LOOKAHEAD_TOKENS) -> tuple[Prompt, np.ndarray]:
        """A silent voice of that many tokens, and as many tokens to speak."""
        ids = np.arange(tokens)
        mel = np.full((TOKEN_MEL_RATIO * tokens, MEL_BINS), SILENT_MEL, np.float32)
        return Prompt(ids, mel, np.ones(self._flow.speaker_dim, np.float32), text=""), ids

    def prefill_frames(self, prompt: Prompt) -> int:
        """Mel frames that opening a stream in that voice prefills: 0 if its prompt cache is there. ValueError for an
        invalid prompt."""
        self._check(prompt)
        return self._flow.prefill_frames(prompt)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Build the prompt caches of different voices in one batch; each is kept while there is room."""
        self._flow.prefill(prompts)

    @torch.inference_mode()
    def open(self, prompt: Prompt) -> Stream:
        """Start a stream in a voice; builds the voice's prompt cache if it is not there yet."""
        self._check(prompt)
        vocoder = self._vocoder.open()
        try:
            return self._flow.open(prompt, vocoder)
        except BaseException:
            self._vocoder.close(vocoder)
            raise

    def chunk(self, stream: Stream, tokens: np.ndarray, *, final: bool, offset: int | None = None) -> Chunk:
        """See `StreamingFlow.chunk`: the next chunk of a stream, or a ValueError."""
        return self._flow.chunk(stream, tokens, final=final, offset=offset)

    @property
    def limits(self) -> BatchLimits:
        return self._flow.limits

    @property
    def batch_tokens(self) -> int:
        """How many tokens a batch should have at most, counted as `Chunk.computed`."""
        return self._flow.batch_tokens

    @property
    def cache_bytes(self) -> int:
        """Memory of the streams and of the prompt caches."""
        return self._flow.cache_bytes + self._vocoder.nbytes

    @property
    def contexts(self) -> tuple[int, float]:
        """TensorRT contexts of the flow, and how many seconds calls have waited for one; 0 without TensorRT."""
        return self._flow.contexts

    def close(self, stream: Stream) -> None:
        """Free what the stream holds. To be called once."""
        self._flow.close(stream)
        self._vocoder.close(stream.vocoder)

    def step(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """The audio that each chunk adds to its stream, float32 (N,) at 24 kHz; empty while it is withheld.

        The chunks are of different streams; batching does not change the audio of any of them.
        """
        audio = []
        for result in self.render(chunks):
            if isinstance(result, Exception):
                raise result
            audio.append(result)
        return audio

    @torch.inference_mode()
    def render(self, chunks: Sequence[Chunk]) -> list[np.ndarray | Exception]:
        """As `step`, but a chunk that cannot be rendered gets an exception, and its stream cannot go on; the others get
        their audio. A batch for which the memory is not enough is rendered in parts.
        """

        def flow(part: Sequence[Chunk]) -> list[Tensor]:
            self._fail_if_asked(part)
            mels = self._flow.render(part)
            return mels if len(part) == len(chunks) else [mel.clone() for mel in mels]  # the next part overwrites them

        mels = isolated(flow, chunks)
        good = [(chunk, mel) for chunk, mel in zip(chunks, mels, strict=True) if isinstance(mel, Tensor)]
        audio = self._vocoder.step([chunk for chunk, _ in good], [mel for _, mel in good])
        if audio and faults.take("nan_audio"):
            audio[0] = torch.full((1,), torch.nan)
        rendered = iter(audio)
        return [_finite(mel if isinstance(mel, Exception) else next(rendered)) for mel in mels]

    def _fail_if_asked(self, chunks: Sequence[Chunk]) -> None:
        """The faults of tests."""
        if faults.take("gpu_error"):
            raise RuntimeError(faults.GPU_ERROR)
        if len(chunks) > 1 and faults.take("out_of_memory"):
            raise MemoryError("out of memory")
        if faults.take("bad_chunk"):
            self._bad_chunk = chunks[0]
        if self._bad_chunk in chunks:
            raise RuntimeError("a bad chunk")

    def whole(self, prompt: Prompt, tokens: np.ndarray, speed: float = 1.0) -> np.ndarray:
        """A whole utterance at once (full attention, no chunks), float32 (N,) at 24 kHz.

        speed: its mel is stretched to 1 / speed of its length, as CosyVoice2 does, which keeps the pitch.
        """
        (audio,) = self.whole_batch([(prompt, tokens)], speed)
        return audio

    @torch.inference_mode()
    def whole_batch(self, utterances: Sequence[tuple[Prompt, np.ndarray]], speed: float = 1.0) -> list[np.ndarray]:
        """Whole utterances in one batch, each as `whole` renders it alone. ValueError if one of them is invalid."""
        for prompt, tokens in utterances:
            self._check(prompt)
            self._flow.check_ids(tokens)
            if len(tokens) == 0:
                raise ValueError("target_speech_tokens is empty: there is nothing to speak")
        mels = self._flow.whole(utterances)
        if speed != 1.0:
            mels = [F.interpolate(mel[None], size=max(1, int(mel.shape[1] / speed)), mode="linear")[0] for mel in mels]
        audio = self._vocoder.whole(mels)
        if not all(torch.isfinite(row).all() for row in audio):
            raise FloatingPointError(NOT_FINITE)
        return [row.numpy() for row in audio]

    def _check(self, prompt: Prompt) -> None:
        self._flow.check_ids(prompt.tokens)
        if 0 < len(prompt.tokens) < LOOKAHEAD_TOKENS:
            count = len(prompt.tokens)
            raise ValueError(f"the prompt has {count} speech tokens; it needs {LOOKAHEAD_TOKENS} or more, or none")


def _finite(audio: Tensor | Exception) -> np.ndarray | Exception:
    """(N,) as an array; an exception if it is one, or contains a value that is not a number."""
    if isinstance(audio, Exception) or torch.isfinite(audio).all():
        return audio if isinstance(audio, Exception) else audio.numpy()
    return FloatingPointError(NOT_FINITE)


def _function(name: str) -> Callable[..., Any]:
    """The function that `name`, "module:function", names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _use(device: torch.device | str) -> None:
    """Make the GPU that `device` names the current one of this thread."""
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
