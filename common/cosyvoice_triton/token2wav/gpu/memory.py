"""How much of a GPU token2wav takes: a check before loading, and what is left for prompt caches, measured afterwards.

A GPU's memory is shared by tritonserver, the LLM, the prompt models and token2wav, which load at the same time: each
has a share that the others leave to it. The check before loading finds settings that cannot fit within a second, where
loading takes a minute. It needs estimates of what CUDA graphs take; what is given to prompt caches is measured.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from cosyvoice_triton.checkpoint import read_state, shapes_of
from cosyvoice_triton.config import SPARE_REQUESTS, KvCacheDtype, PromptDevice, Token2WavConfig, planned_llm_gib
from cosyvoice_triton.constants import HOP_SAMPLES, MEL_RATE, STREAM_CACHE_FRAMES
from cosyvoice_triton.networks.flow.config import (
    CosyVoice3FlowConfig,
    DiTFlowConfig,
    UNetFlowConfig,
    euler_steps,
    stated_solve,
)
from cosyvoice_triton.runtimes.loading import flow_runtime
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.gpu.limits import ENCODER_TOKENS, HIFT_FRAMES, BatchLimits
from cosyvoice_triton.token2wav.gpu.quantization import SCALE_BYTES

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # the models log warnings otherwise, and this at every start

MIB, GIB = 1 << 20, 1 << 30
VOICE_SECONDS = 5.0  # of the recording of a voice: each stream should have room for one of its own
UNPLANNED_VOICES = 4 * GIB  # for prompt caches where nothing is planned: in offline tools
# Files with the limit of a container's memory, by version 2 and 1 of Linux's control groups. Beyond it the process is
# killed, however much the machine has.
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

# The shares of others, measured: tritonserver with the MPS daemon, and the process of `audio_tokenizer` without its
# weights (`speaker_embedding` is on the CPU).
SERVER = 1000 * MIB
PROMPT_MODELS = 900 * MIB
# What torch does not count in this process, measured: CUDA's context and kernels, and each CUDA graph's launches.
PROCESS = 750 * MIB
LAUNCHES = 3 * MIB
# Room for what is not allocated when prompt caches get the rest: whole utterances and voices of 30 s beyond the graphs,
# tensors around the graphs, and the work space of cuBLAS on each stream.
RESERVE = 448 * MIB
# Estimates for the check: fused forms keep copies of some weights; of all networks, which take turns, the vocoder's
# batches need the most, so many values for each sample.
COPIES = 1.4
SAMPLE_VALUES = 250


@dataclass(frozen=True)
class Reading:
    """What a GPU's driver and torch say, in bytes: free on the GPU, all of its memory, and what torch has reserved."""

    free: int
    total: int
    reserved: int = 0

    @classmethod
    def of(cls, device: str) -> "Reading":
        """Read them, without what torch keeps but does not use."""
        torch.cuda.empty_cache()
        return cls(*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Sizes of a stack's networks in bytes.

    weights: of flow and vocoder as they are served, with the noise. vocoder_stream: the vocoder's part of a stream.
    flow_size, vocoder_size: of each value that they compute. steps: of the Euler solve. tokenizer: of the speech
    tokenizer's weights; None if the prompt models are on the CPU. kv_cache_dtype: see `Token2WavConfig`.
    """

    flow: DiTFlowConfig | UNetFlowConfig | CosyVoice3FlowConfig
    weights: int
    vocoder_stream: int
    flow_size: int
    vocoder_size: int
    steps: int
    tokenizer: int | None
    kv_cache_dtype: KvCacheDtype = "auto"

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
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> "Networks":
        """Read the sizes, and nothing else, from the files of a checkpoint."""
        tokenizer = model_dir / stack.speech_tokenizer  # another model reads it, maybe from elsewhere
        tokenizer_size = tokenizer.stat().st_size if tokenizer.exists() else 0
        shapes, vocoder = (shapes_of(read_state(model_dir / name, "meta")) for name in (stack.flow, stack.hift))
        values, vocoder_values = (sum(map(math.prod, of.values())) for of in (shapes, vocoder))
        return cls(
            flow=resolve_name(stack.flow_config).from_shapes(shapes, **stated_solve(model_dir / stack.flow)),
            weights=values * flow_size + vocoder_values * vocoder_size + stack.vocoder_noise_bytes,
            vocoder_stream=stack.vocoder_stream_bytes,
            flow_size=flow_size,
            vocoder_size=vocoder_size,
            steps=steps,
            tokenizer=None if prompt_device == "cpu" else tokenizer_size,
            kv_cache_dtype=kv_cache_dtype,
        )

    @property
    def frame(self) -> int:
        """Return the bytes of keys and values of a mel frame; a flow that computes its window again keeps none."""
        if isinstance(self.flow, UNetFlowConfig):
            return 0
        of = self.flow.estimator
        row = of.head_dim + SCALE_BYTES if self.kv_cache_dtype == "int8" else of.head_dim * self.flow_size
        return self.steps * self.flow.rows * of.depth * 2 * of.heads * row

    @property
    def history(self) -> int:
        """Return the bytes of the convolutions' history of a stream or a voice."""
        if isinstance(self.flow, UNetFlowConfig):
            return 0
        of = self.flow.estimator
        return self.steps * of.conv_pairs * 2 * self.flow.rows * (of.conv_kernel - 1) * of.width * self.flow_size

    def voice(self, seconds: float) -> int:
        """Return the bytes of the prompt cache of a recording."""
        return int(seconds * MEL_RATE) * self.frame + self.history

    def voices(self, limits: BatchLimits) -> int:
        """Return the bytes for a voice of VOICE_SECONDS of each stream, or one of the longest."""
        return max(limits.max_streams * self.voice(VOICE_SECONDS), self.longest_voice(limits))

    def longest_voice(self, limits: BatchLimits) -> int:
        return self.voice(limits.prompt_frames[-1] / MEL_RATE)

    def streams(self, count: int) -> int:
        """Return the bytes of that many streams: the most recent frames, history, and the vocoder's part. One slot more
        is for the padding of batches."""
        return (count + 1) * (STREAM_CACHE_FRAMES * self.frame + self.history + self.vocoder_stream)

    def batches(self, limits: BatchLimits) -> int:
        """Return about how many bytes CUDA graphs' tensors take: those of each worker's largest batch, with the keys
        and values of a step."""
        frames = sum(max(B * T for B, T in of.sizes(of.chunk_frames, HIFT_FRAMES)) for of in limits.of_each_worker)
        computed = replace(self, kv_cache_dtype="auto").frame // self.steps
        return frames * (HOP_SAMPLES * SAMPLE_VALUES * self.vocoder_size + computed)


def graphs(limits: BatchLimits) -> int:
    """Return about how many CUDA graphs there are: those of the encoder, the flow and the vocoder."""
    return sum(
        len(of.sizes(of.window_tokens, ENCODER_TOKENS)) + 3 * len(of.sizes(of.chunk_frames, HIFT_FRAMES))
        for of in limits.of_each_worker
    )


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory of a GPU is shared.

    memory: bytes of the GPU that the server may take. parts: estimated bytes by what takes them. minimum: bytes for
    prompt caches that streams need, see `Networks.voices`. voice: bytes of one of VOICE_SECONDS. limits: with as many
    workers as there is room for.
    """

    memory: int
    parts: Mapping[str, int]
    minimum: int
    voice: int
    limits: BatchLimits

    @property
    def own(self) -> int:
        """Return the bytes that torch may allocate in token2wav's process."""
        return self.memory - sum(self.parts[name] for name in ("server", "LLM", "prompt models", "process"))

    @property
    def lacking(self) -> int:
        """Return the bytes that would have to be added; negative if there are some left."""
        return sum(self.parts.values()) + self.minimum - self.memory

    def voices(self, loaded: Reading) -> int:
        """Return the bytes for prompt caches, measured after the networks are loaded and their graphs captured: what
        they leave of this process's share, and no more than is free. ValueError if no voice fits."""
        left = min(self.own - loaded.reserved, loaded.free) - RESERVE
        logger.info("memory of token2wav: %.2f GiB, and %.2f for voices", loaded.reserved / GIB, left / GIB)
        more = math.ceil(10 * (self.memory + self.minimum - left) / GIB) / 10
        if left < self.voice:
            raise ValueError(
                f"token2wav took {loaded.reserved / GIB:.1f} GiB, which leaves {max(left, 0) / GIB:.2f} for voices, "
                f"and one of {VOICE_SECONDS:g} s takes {self.voice / GIB:.2f}: set max_streams < "
                f"{self.limits.max_streams} or gpu_memory_gib >= {more}\n{self}"
            )
        if left < self.minimum:
            logger.warning(
                "there are %.2f GiB for voices, and one of %g s of each stream takes %.2f: new voices may have to "
                "wait; set gpu_memory_gib >= %.1f or max_streams < %d",
                left / GIB, VOICE_SECONDS, self.minimum / GIB, more, self.limits.max_streams,
            )  # fmt: skip
        return left

    def __str__(self) -> str:
        rows = {**self.parts, "voices": self.memory - sum(self.parts.values()), "sum": self.memory}
        lines = [f"  {name:<40}{size / GIB:8.2f} GiB" for name, size in rows.items()]
        return "\n".join(["estimated memory of the GPU:", *lines])


def others(networks: Networks, streams: int, llm_gib: float | None) -> dict[str, int]:
    """Return the bytes of the GPU that the other processes take. llm_gib: the LLM's; None: `planned_llm_gib`."""
    llm = planned_llm_gib(streams + SPARE_REQUESTS) if llm_gib is None else llm_gib
    prompts = 0 if networks.tokenizer is None else PROMPT_MODELS + networks.tokenizer
    return {"server": SERVER, "LLM": int(GIB * llm), "prompt models": prompts}


def plan_memory(
    networks: Networks, limits: BatchLimits, reading: Reading, gpu_gib: float | None, llm_gib: float | None
) -> MemoryPlan:
    """Share the memory, before anything is loaded: with as many workers as there is room for, up to `limits.workers`.

    gpu_gib: GiB that the server may take; None: what is free, or taken already by what it has loaded. llm_gib: of them,
    the LLM's, as in `others`. ValueError that names what would fit if `limits.max_streams` streams do not.
    """

    streams = limits.max_streams
    if gpu_gib is None:  # this process's context is loaded, and the other models may be
        may_take = reading.free + PROCESS + sum(others(networks, streams, llm_gib).values())
    else:
        may_take = int(gpu_gib * GIB)
    memory = min(may_take, reading.total)

    def shared(streams: int, workers: int = 1) -> MemoryPlan:
        of = replace(limits, max_streams=streams, workers=workers)
        parts = {
            **others(networks, streams, llm_gib),
            "process": PROCESS + LAUNCHES * graphs(of),
            "weights": int(COPIES * networks.weights),
            "CUDA graphs": networks.batches(of),
            "streams": networks.streams(streams),
            "reserve": RESERVE,
        }
        return MemoryPlan(memory, parts, networks.voices(of), networks.voice(VOICE_SECONDS), of)

    made = [shared(streams, workers) for workers in range(1, limits.workers + 1)]
    if fits := [plan for plan in made if plan.lacking <= 0]:
        logger.info("%s", fits[-1])
        if fits[-1] is not made[-1]:
            more = made[-1].lacking / GIB
            logger.info("with %.1f GiB more, first chunks would not wait for other batches", more)
        return fits[-1]
    lacking = made[0].lacking
    needed = math.ceil(10 * (memory + lacking) / GIB) / 10
    fitting = next((fewer for fewer in range(streams - 1, 0, -1) if shared(fewer).lacking <= 0), 0)
    raise ValueError(
        f"max_streams {streams} needs {needed} GiB, and gpu_memory_gib is {memory / GIB:.1f}: set "
        + (f"max_streams <= {fitting} or " if fitting else "")
        + ("prompt_device cpu or " if lacking <= made[0].parts["prompt models"] else "")
        + f"gpu_memory_gib >= {needed}\n{made[0]}"
    )


def host_memory(limits: Sequence[Path] = CONTAINER_LIMITS) -> int:
    """Return the bytes of memory of this machine, or of this container if it may take less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    given = (path.read_text().strip() for path in limits if path.is_file())
    return min(sizes + [int(limit) for limit in given if limit != "max"])


def voices_on_host(networks: Networks, limits: BatchLimits) -> int:
    """Return the bytes of prompt caches on a CPU: what the rest leaves of half of the memory, and at least one of the
    longest."""
    left = host_memory() // 2 - networks.weights - networks.streams(limits.max_streams)
    return max(left, networks.longest_voice(limits))


def planned(
    stack: Stack, config: Token2WavConfig, limits: BatchLimits, flow_size: int, vocoder_size: int
) -> MemoryPlan | int:
    """Plan a GPU's memory, and cap what torch takes of it in this process; on a CPU, return bytes for prompt caches.
    flow_size, vocoder_size: bytes of a number."""
    networks = Networks.read(
        stack,
        Path(config.model_dir),
        flow_size=flow_size,
        vocoder_size=vocoder_size,
        steps=euler_steps(Path(config.model_dir) / stack.flow, config.n_timesteps),
        prompt_device=config.prompt_device,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    if torch.device(config.device).type != "cuda":
        return voices_on_host(networks, limits)
    if flow_runtime(config.flow_runtime, config.device) != "cuda_graph":
        limits = replace(limits, workers=1)  # others need CUDA graphs of the flow
    reading = Reading.of(config.device)
    made = plan_memory(networks, limits, reading, config.gpu_memory_gib, config.llm_share_gib)
    torch.cuda.set_per_process_memory_fraction(made.own / reading.total, config.device)
    return made
