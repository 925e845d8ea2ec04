"""What a token2wav model takes of a GPU, computed from its settings and its networks' sizes before they are loaded.

A GPU's memory is shared by tritonserver, the LLM, the prompt models and token2wav, which needs, whatever happens, its
process, weights, the temporary tensors of the largest batches, `max_streams` streams, and for each of them a voice of
VOICE_SECONDS, or one of the longest. What remains is for more and longer voices.
"""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

from cosyvoice_triton.checkpoint import Shapes, read_state, shapes_of
from cosyvoice_triton.config import SPARE_REQUESTS, PromptDevice, planned_llm_gib
from cosyvoice_triton.constants import HOP_SAMPLES, MAX_REFERENCE_SECONDS, MEL_RATE, TAIL_FRAMES, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.config import (
    CosyVoice3FlowConfig,
    DiTConfig,
    DiTFlowConfig,
    LookaheadConfig,
    RotaryDiTConfig,
    UNetFlowConfig,
)
from cosyvoice_triton.networks.flow.encoder import scores_at_once
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.gpu.limits import (
    COSYVOICE3_FRAMES,
    DIT_FRAMES,
    ENCODER_TOKENS,
    HIFT_FRAMES,
    PREFILL_FRAMES,
    UNET_FRAMES,
    BatchLimits,
    Size,
)

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # of the models' logs, which are warnings otherwise, the plan is a part

MIB, GIB = 1 << 20, 1 << 30
VOICE_SECONDS = 5.0  # of its recording
UNPLANNED_VOICES = 4 * GIB  # for prompt caches where nothing is planned: in offline tools

# Measured on a GPU (docs/results/operations.md).
SERVER = 1000 * MIB  # tritonserver itself and the MPS daemon: what the other parts do not explain
PROMPT_MODELS = 900 * MIB  # the process of `audio_tokenizer` apart from weights; `speaker_embedding` is on the CPU
PROCESS = 750 * MIB  # CUDA's context and kernels
LAUNCHES = 3 * MIB  # of a CUDA graph, beside torch's memory
GRAPH_INPUTS = 1 * MIB  # of one, and results
WORK_SPACE = 60 * MIB  # of the libraries, for each worker
FLOW_NOISE = 5 * MIB
# Values that are alive at once for a token or frame of a batch, per unit of the network's width.
ENCODER_VALUES = 20
DIT_VALUES = 24
UNET_VALUES = 28
ROTARY_VALUES = 32  # estimated, not measured
HIFT_VALUES = 250  # per sample
WHOLE_HIFT_VALUES = 150  # the same of a whole utterance, which has no graph
SCORE_VALUES = 1.6
FUSED_VOCODER_SIZE = 2  # bytes per value in which HiFT has a fused form; the causal HiFT of CosyVoice3 has none
FRAGMENTS = 1.25  # the tensors of one network do not fill the places of another's exactly


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Sizes of a stack's networks.

    shapes: of the flow's tensors. vocoder: values of its weights. vocoder_stream, noise: bytes of the
    vocoder's part of a stream, and of the noise of flow and vocoder. flow_size, vocoder_size: bytes per value in which
    they compute. steps: of the Euler solve. tokenizer: bytes of the speech tokenizer's weights; None if the prompt
    models are on the CPU. fused: whether the encoder's kernels are, which store no scores of its attention.
    """

    flow: DiTFlowConfig | UNetFlowConfig | CosyVoice3FlowConfig
    shapes: Shapes
    vocoder: int
    vocoder_stream: int
    noise: int
    flow_size: int
    vocoder_size: int
    steps: int
    tokenizer: int | None
    fused: bool = True

    @classmethod
    def read(
        cls,
        stack: Stack,
        model_dir: Path,
        *,
        flow_size: int,
        vocoder_size: int,
        steps: int,
        prompt_device: PromptDevice = "auto",
        fused: bool = True,
    ) -> "Networks":
        """From the files of a checkpoint, of which only the sizes are read."""
        tokenizer = model_dir / stack.speech_tokenizer  # another model reads it, maybe from elsewhere
        tokenizer_size = tokenizer.stat().st_size if tokenizer.exists() else 0
        shapes = shapes_of(read_state(model_dir / stack.flow, "meta"))
        return cls(
            flow=resolve_name(stack.flow_config).from_shapes(shapes),
            shapes=shapes,
            vocoder=sum(map(math.prod, shapes_of(read_state(model_dir / stack.hift, "meta")).values())),
            vocoder_stream=stack.vocoder_stream_bytes,
            noise=FLOW_NOISE + stack.vocoder_noise_bytes,
            flow_size=flow_size,
            vocoder_size=vocoder_size,
            steps=steps,
            tokenizer=None if prompt_device == "cpu" else tokenizer_size,
            fused=fused,
        )

    @property
    def weights(self) -> int:
        """Bytes of the weights, of the copies of some in a fused estimator and vocoder, and of the noise."""
        values = sum(map(math.prod, self.shapes.values()))
        estimator = {name: shape for name, shape in self.shapes.items() if name.startswith("decoder.")}
        values += sum(math.prod(shape) for name, shape in estimator.items() if _is_fused(name, shape))
        vocoder = self.vocoder * self.vocoder_size
        if self.vocoder_size == FUSED_VOCODER_SIZE and not isinstance(self.flow, CosyVoice3FlowConfig):
            vocoder *= 2  # see `FusedBody`
        return values * self.flow_size + vocoder + self.noise

    def encoder(self, limits: BatchLimits) -> int:
        """Bytes of what a fused encoder keeps beside the weights: copies of some, and projections of all distances."""
        of = self.flow.encoder
        if isinstance(of, LookaheadConfig) or not self.fused:
            return 0
        copied = [
            shape for name, shape in self.shapes.items() if name.startswith("encoder.") and _is_fused(name, shape)
        ]
        values = sum(map(math.prod, [*copied, self.shapes["input_embedding.weight"]]))
        distances = 2 * limits.window_tokens[-1] * (of.blocks + of.ratio * of.up_blocks)
        return (values + distances * of.width) * self.flow_size

    @property
    def frame(self) -> int:
        """Bytes of keys and values of a mel frame, which a flow that computes its window again does not keep."""
        if isinstance(self.flow, UNetFlowConfig):
            return 0
        return kept_per_frame(self.flow.estimator, self.steps, self.flow_size)

    @property
    def history(self) -> int:
        """Bytes of the convolutions' history of a stream or a voice."""
        if isinstance(self.flow, UNetFlowConfig):
            return 0
        of = self.flow.estimator
        return self.steps * of.conv_pairs * 2 * 2 * (of.conv_kernel - 1) * of.width * self.flow_size

    def voice(self, seconds: float) -> int:
        """Bytes of the prompt cache of a recording."""
        return int(seconds * MEL_RATE) * self.frame + self.history

    def longest_voice(self, limits: BatchLimits) -> int:
        return self.voice(limits.prompt_frames[-1] / MEL_RATE)

    def streams(self, count: int) -> int:
        """Bytes of that many streams: the most recent frames, history, and the vocoder's part. One slot more is for the
        padding of batches."""
        return (count + 1) * (TAIL_FRAMES * self.frame + self.history + self.vocoder_stream)

    def batches(self, limits: BatchLimits) -> int:
        """Bytes of temporary tensors: of the network that needs most, because they take turns, for each of the batches
        that are computed at the same time."""
        of_each = (max(self._encoder(of), self._solve(of), self._vocode(of)) for of in limits.of_each_worker)
        return int(FRAGMENTS * sum(of_each)) + WORK_SPACE * limits.workers

    def _encoder(self, limits: BatchLimits) -> int:
        config, sizes = self.flow.encoder, limits.sizes(limits.window_tokens, ENCODER_TOKENS)
        if isinstance(config, LookaheadConfig):  # no attention
            return ENCODER_VALUES * config.hidden * _most(sizes) * self.flow_size
        scores = 0 if self.fused else max(scores_at_once(TOKEN_MEL_RATIO * T, config.heads * B) for B, T in sizes)
        values = ENCODER_VALUES * config.width * TOKEN_MEL_RATIO * _most(sizes)
        return int(values + SCORE_VALUES * scores) * self.flow_size

    def _solve(self, limits: BatchLimits) -> int:
        if isinstance(self.flow, UNetFlowConfig):
            frames = _most(limits.sizes(limits.window_frames, UNET_FRAMES))
            return frames * self._solved_frame
        frames = _most(limits.sizes(limits.row_frames, self._most_frames))
        if limits.of_prompts:
            frames = max(frames, _most(limits.sizes(limits.prompt_frames, PREFILL_FRAMES)))
        kept = frames * self.frame // self.steps + 3 * limits.max_chunks * self.history
        return frames * self._solved_frame + kept

    @property
    def _solved_frame(self) -> int:
        """Bytes of the estimator's temporary tensors for a frame, in both rows of the guidance."""
        if isinstance(self.flow, UNetFlowConfig):
            return 2 * UNET_VALUES * self.flow.estimator.channels * self.flow_size
        per_channel = DIT_VALUES if isinstance(self.flow, DiTFlowConfig) else ROTARY_VALUES
        return 2 * per_channel * self.flow.estimator.width * self.flow_size

    @property
    def _most_frames(self) -> int:
        """Of a batch of chunks, if the flow keeps keys and values."""
        return DIT_FRAMES if isinstance(self.flow, DiTFlowConfig) else COSYVOICE3_FRAMES

    def _vocode(self, limits: BatchLimits) -> int:
        return HIFT_VALUES * HOP_SAMPLES * _most(limits.sizes(limits.chunk_frames, HIFT_FRAMES)) * self.vocoder_size

    @property
    def whole(self) -> int:
        """Bytes of temporary tensors outside of graphs: of an utterance and a voice of 30 s each."""
        frames = int(MEL_RATE * MAX_REFERENCE_SECONDS)
        return max(WHOLE_HIFT_VALUES * HOP_SAMPLES * frames * self.vocoder_size, 2 * frames * self._solved_frame)

    def graphs(self, limits: BatchLimits) -> int:
        """How many CUDA graphs there are."""
        return sum(len(sizes) for of in limits.of_each_worker for sizes in self._graph_sizes(of))

    def _graph_sizes(self, limits: BatchLimits) -> list[list[Size]]:
        """Of each function."""
        made = [
            limits.sizes(limits.window_tokens, ENCODER_TOKENS),
            limits.sizes(limits.first_chunk_frames, HIFT_FRAMES),
        ]
        if not limits.starts:
            made.append(limits.sizes(limits.chunk_frames, HIFT_FRAMES))
        if isinstance(self.flow, UNetFlowConfig):
            return [*made, limits.sizes(limits.window_frames, UNET_FRAMES)]
        made.append(limits.sizes(limits.row_frames, self._most_frames))
        if limits.of_prompts:
            made.append(limits.sizes(limits.prompt_frames, PREFILL_FRAMES))
        return made


@dataclass(frozen=True)
class MemoryPlan:
    """memory: bytes of the GPU that the server may take. parts: bytes by what takes them. voice: bytes of a voice of
    VOICE_SECONDS. workers: see `BatchLimits`. lacking: bytes for which first chunks have no worker, or 0."""

    memory: int
    parts: Mapping[str, int]
    voice: int
    workers: int
    lacking: int = 0

    @property
    def voices(self) -> int:
        """Bytes that remain for prompt caches."""
        return self.memory - sum(self.parts.values())

    @property
    def own(self) -> int:
        """Bytes that torch may allocate in token2wav's process."""
        return self.memory - sum(self.parts[name] for name in _NOT_OF_TORCH)

    def log(self) -> None:
        logger.info("%s", self)

    def __str__(self) -> str:
        rows = {**self.parts, "voices": self.voices, "sum": self.memory}
        lines = [f"  {name:<40}{size / GIB:8.2f} GiB" for name, size in rows.items()]
        if self.voice:
            lines[-2] += f", {self.voices // self.voice} of {VOICE_SECONDS:g} s"
        if self.lacking:
            lines.append(f"  with {self.lacking / GIB:.1f} GiB more, first chunks would not wait for other batches")
        return "\n".join(["memory of the GPU:", *lines])


# The parts of a plan that torch does not allocate in token2wav's process.
_NOT_OF_TORCH = ("server", "LLM", "prompt models", "process")


def other_models(networks: Networks, streams: int, llm_gib: float | None) -> dict[str, int]:
    """Bytes of the GPU that the other processes take. llm_gib: the LLM's; None: `planned_llm_gib`."""
    llm = planned_llm_gib(streams + SPARE_REQUESTS) if llm_gib is None else llm_gib
    prompts = 0 if networks.tokenizer is None else PROMPT_MODELS + networks.tokenizer
    return {"server": SERVER, "LLM": int(GIB * llm), "prompt models": prompts}


def plan_memory(networks: Networks, limits: BatchLimits, memory: int, llm_gib: float | None) -> MemoryPlan:
    """How the memory is used: with as many workers as there is room for, up to `limits.workers`. ValueError with what
    would fit if `limits.max_streams` streams do not.

    memory: bytes of the GPU that the server may take. llm_gib: of them, the LLM's, as in `other_models`.
    """

    def missing(streams: int, workers: int = 1) -> tuple[MemoryPlan, int]:
        fewer = replace(limits, max_streams=streams, workers=workers)
        graphs = networks.graphs(fewer)
        parts = {
            **other_models(networks, streams, llm_gib),
            "process": PROCESS + LAUNCHES * graphs,
            "weights": networks.weights + networks.encoder(fewer),
            "temporary tensors": networks.batches(fewer),
            "graphs": GRAPH_INPUTS * graphs,
            "streams": networks.streams(streams),
            "whole utterances": networks.whole,
        }
        voices = max(streams * networks.voice(VOICE_SECONDS), networks.longest_voice(limits))
        made = MemoryPlan(memory, parts, networks.voice(VOICE_SECONDS), workers)
        return made, voices - made.voices

    streams = limits.max_streams
    made, lacking = missing(streams)
    if lacking <= 0:
        workers = max(workers for workers in range(1, limits.workers + 1) if missing(streams, workers)[1] <= 0)
        return replace(missing(streams, workers)[0], lacking=max(0, missing(streams, min(2, limits.workers))[1]))
    needed = math.ceil(10 * (memory + lacking) / GIB) / 10
    fitting = next((fewer for fewer in range(streams - 1, 0, -1) if missing(fewer)[1] <= 0), 0)
    raise ValueError(
        f"max_streams {streams} needs {needed} GiB, and gpu_memory_gib is {memory / GIB:.1f}: set "
        + (f"max_streams <= {fitting} or " if fitting else "")
        + ("prompt_device cpu or " if lacking <= made.parts["prompt models"] else "")
        + f"gpu_memory_gib >= {needed}\n{made}"
    )


def kept_per_frame(config: DiTConfig | RotaryDiTConfig, steps: int, size: int) -> int:
    """Bytes of an estimator's keys and values of a mel frame, in both rows of the guidance. size: bytes per value."""
    return 2 * steps * config.depth * 2 * config.heads * config.head_dim * size


def voices_on_host(networks: Networks, limits: BatchLimits) -> int:
    """Bytes of prompt caches on a CPU: of half of the machine's memory what the rest leaves, one of the longest at
    least."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(memory - networks.weights - networks.streams(limits.max_streams), networks.longest_voice(limits))


def _most(sizes: list[Size]) -> int:
    """Frames or tokens of the largest batch."""
    return max(map(math.prod, sizes))


def _is_fused(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a fused form keeps a copy: of convolutions, and of the projections to queries, keys and values."""
    return len(shape) == 3 or name.endswith(tuple(f"{kind}_{of}.weight" for kind in ("to", "linear") for of in "qkv"))
