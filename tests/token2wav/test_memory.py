"""The memory of a GPU: what fits is loaded, what does not is refused with what would, the rest is for prompt caches.
Batch and graph sizes cover what the hops can make, and stay within streams and memory."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cosyvoice_triton import profiles, stacks
from cosyvoice_triton.config import SPARE_REQUESTS, ChunkStrategy, KvCacheDtype, Token2WavConfig, planned_llm_gib
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    LOOKAHEAD_TOKENS,
    MAX_PROMPT_TOKENS,
    ONSET_TOKENS,
    TOKEN_MEL_RATIO,
)
from cosyvoice_triton.demo_checkpoint import STACKS
from cosyvoice_triton.networks import flow as flows
from cosyvoice_triton.networks.flow.config import euler_steps
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.profiles import LimitNumbers, Profile, SchedulerNumbers
from cosyvoice_triton.server import gpus
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Precision, Token2Wav
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.gpu.limits import (
    COSYVOICE3_FRAMES,
    DIT_FRAMES,
    ENCODER_TOKENS,
    HIFT_FRAMES,
    PREFILL_FRAMES,
    UNET_FRAMES,
    BatchLimits,
    padding,
)
from cosyvoice_triton.token2wav.gpu.memory import (
    GIB,
    PROCESS,
    PROMPT_MODELS,
    RESERVE,
    SERVER,
    VOICE_SECONDS,
    MemoryPlan,
    Networks,
    Reading,
    host_memory,
    plan_memory,
    voices_on_host,
)
from cosyvoice_triton.token2wav.policy.scheduler import CHUNK_WORKER, FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.vocoder.base import GraphedRenderer
from cosyvoice_triton.voice.prompt import Prompt

FLOAT32 = Precision(torch.float32, torch.float32)
OFFICIAL = {
    stacks.DIT: (flows.DiTFlow, flows.DiTFlowConfig()),
    stacks.UNET: (flows.UNetFlow, flows.UNetFlowConfig()),
    stacks.COSYVOICE3: (flows.CosyVoice3Flow, flows.CosyVoice3FlowConfig()),
}
HIFT_VALUES = 20_806_557
TOKENIZERS = {"v2": 495_900_000, "v3": 968_000_000}  # bytes
VOICE = Prompt(np.arange(30), np.zeros((60, 80), np.float32), np.ones(192, np.float32), text="")
EMPTY = Reading(free=200 * GIB, total=200 * GIB)


@cache
def flow_values(stack: Stack) -> int:
    kind, config = OFFICIAL[stack]
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in kind(config).parameters())


def official(stack: Stack, prompt_device: str = "auto") -> Networks:
    """At the official sizes, in float16."""
    values = HIFT_VALUES + flow_values(stack)
    tokenizer = TOKENIZERS[stack.speech_tokenizer.split("_")[2][:2]]
    return Networks(
        flow=OFFICIAL[stack][1],
        weights=2 * values + stack.vocoder_noise_bytes,
        vocoder_stream=stack.vocoder_stream_bytes,
        flow_size=2,
        vocoder_size=2,
        steps=10,
        tokenizer=None if prompt_device == "cpu" else tokenizer,
    )


def limits(stack: Stack, streams: int) -> BatchLimits:
    return BatchLimits(max_streams=streams, chunk_boundary=stack.chunk_boundary)


def plan(stack: Stack, streams: int, gib: float | None, prompt_device: str = "auto") -> MemoryPlan:
    return plan_memory(official(stack, prompt_device), limits(stack, streams), EMPTY, gib, None)


@pytest.mark.parametrize(
    ("stack", "kept"),
    [*((stack, "auto") for stack in STACKS), (stacks.DIT, "int8")],
    ids=lambda value: getattr(value, "name", value),
)
def test_weights_streams_and_voices_have_the_sizes_that_are_read(
    stack: Stack, kept: KvCacheDtype, demo_files: Path
) -> None:
    directory = demo_files / stack.checkpoint
    read = Networks.read(stack, directory, flow_size=4, vocoder_size=4, steps=2, kv_cache_dtype=kept)
    engine = Token2Wav.load(
        stack, directory, device="cpu", limits=limits(stack, 3), precision=FLOAT32, runtime="torch", steps=2,
        kv_cache_dtype=kept,
    )  # fmt: skip
    flow, vocoder = engine._flow, engine._vocoder
    assert flow.cache_bytes == pytest.approx(replace(read, vocoder_stream=0).streams(3), rel=0.03)
    assert 0 < vocoder.nbytes <= (3 + 1) * stack.vocoder_stream_bytes, "that of official sizes"
    weights = sum(tensor.nbytes for of in (flow._network, vocoder._network) for tensor in of.parameters())
    assert read.weights - stack.vocoder_noise_bytes == pytest.approx(weights, rel=0.05)
    if isinstance(flow, CachedStreaming):
        stream = engine.open(VOICE)
        frames = 50 if stack is stacks.COSYVOICE3 else 60  # cosyvoice3 keeps whole chunks of the voice's 60
        assert stream.prompt.nbytes == read.voice(frames / 50)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_a_checkpoint_decides_steps_grid_and_rows_of_its_flow(stack: Stack, demo_files: Path, tmp_path: Path) -> None:
    """With half the steps and no unconditional rows, streams and voices take a quarter of the memory."""
    for file in (demo_files / stack.checkpoint).iterdir():
        (tmp_path / file.name).symlink_to(file)
    options: dict[str, Any] = {"device": "cpu", "limits": limits(stack, 2), "precision": FLOAT32}
    sizes: dict[str, Any] = {"flow_size": 4, "vocoder_size": 4}
    upstream = Networks.read(stack, tmp_path, steps=euler_steps(tmp_path / stack.flow), **sizes)
    (tmp_path / "flow.json").write_text('{"steps": 5, "time_grid": [0, 0.1, 0.3, 0.5, 0.8, 1], "guidance": 0}')
    flow = Token2Wav.load(stack, tmp_path, **options)._flow
    assert flow._steps == 5 and flow._network.decoder.rows == 1
    assert flow._network.decoder.schedule(5)[0] == pytest.approx([0, 0.1, 0.3, 0.5, 0.8])
    read = Networks.read(stack, tmp_path, steps=5, **sizes)
    assert (read.frame, read.history) == (upstream.frame / 4, upstream.history / 4)
    if isinstance(flow, CachedStreaming):
        assert flow._pool.prompt_bytes(60) == read.voice(60 / 50)
    with pytest.raises(ValueError, match="n_timesteps 10: .* of 5 steps"):
        Token2Wav.load(stack, tmp_path, steps=10, **options)


def test_in_8_bits_voices_and_streams_take_half_and_more_of_them_fit() -> None:
    full = official(stacks.DIT)
    int8 = replace(full, kv_cache_dtype="int8")
    sizes = [[round(of.voice(5) / 2**20), round(of.streams(0) / 2**20)] for of in (full, int8)]
    assert sizes == [[158, 64], [84, 34]]
    many = limits(stacks.DIT, 500)
    plan_memory(int8, many, EMPTY, 80, None)
    with pytest.raises(ValueError, match="max_streams 500 needs"):
        plan_memory(full, many, EMPTY, 80, None)
    assert int8.batches(many) == full.batches(many), "what is computed is not in 8 bits"


@pytest.mark.parametrize(
    ("stack", "gib", "streams", "prompt_device", "workers"),
    [
        *((stacks.DIT, gib, 4 << row, "cpu", 2) for row, gib in ((0, 7.2), (2, 10.7), (3, 14.8), (4, 22.4), (5, 37.5))),
        (stacks.DIT, 67.7, 256, "cpu", 2),
        *((stacks.UNET, gib, 4 << row, "cpu", 2) for row, gib in ((0, 5.9), (2, 7.0), (3, 7.7), (4, 8.3), (5, 9.6))),
        (stacks.UNET, 12.2, 256, "cpu", 2),
        *((stacks.COSYVOICE3, gib, 4 << row, "cpu", 2) for row, gib in ((0, 10.5), (2, 18.2), (3, 28.6), (4, 48.5))),
        (stacks.COSYVOICE3, 87.7, 128, "cpu", 2),
        *((stack, gib, 64, "auto", 2) for stack, gib in ((stacks.DIT, 23.8), (stacks.COSYVOICE3, 50.3))),
        (stacks.DIT, 11.6, 16, "auto", 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_settings_that_the_documents_name_fit_with_as_many_workers_as_there_is_room_for(
    stack: Stack, gib: float, streams: int, prompt_device: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The table of docs/sizing.md."""
    made = plan(stack, streams, gib, prompt_device)
    assert made.limits.workers == workers and made.lacking <= 0
    assert caplog.messages[0].splitlines()[-1].split() == ["sum", f"{gib:.2f}", "GiB"]  # whatever other loggers' levels
    if workers == 1:
        assert (more := re.fullmatch(r"with (.*) GiB more, first chunks would not wait for .*", caplog.messages[1]))
        assert plan(stack, streams, gib + float(more[1]) + 0.1, prompt_device).limits.workers == 2


@pytest.mark.parametrize("card", profiles.GPU_PLANS, ids=lambda card: f"{card.card} GB")
def test_the_plan_of_a_card_has_room_for_both_workers_by_the_check_before_loading(card: profiles.GpuPlan) -> None:
    for name, of in card.streams.items():
        made = plan(stacks.named(name), of.listeners, of.gib, card.prompt_device)
        assert made.limits.workers == 2 and -0.1 > made.lacking / GIB > -2, (name, made.lacking / GIB)


def test_streams_that_do_not_fit_are_refused_with_the_numbers_that_do() -> None:
    with pytest.raises(
        ValueError, match=r"^max_streams 64 needs [\d.]+ GiB, and gpu_memory_gib is 12.0: set "
    ) as refused:
        plan(stacks.DIT, 64, 12)
    found = re.search(r"max_streams <= (\d+) or gpu_memory_gib >= ([\d.]+)", str(refused.value))
    assert found is not None
    fewer, more = int(found[1]), float(found[2])
    assert 16 <= fewer < 64 and 12 < more < 24
    plan(stacks.DIT, fewer, 12)
    plan(stacks.DIT, 64, more)
    for streams, gib in ((fewer + 1, 12), (64, more - 0.2)):
        with pytest.raises(ValueError, match="gpu_memory_gib"):
            plan(stacks.DIT, streams, gib)
    with pytest.raises(ValueError, match="set gpu_memory_gib >= "):  # no number of streams fits
        plan(stacks.DIT, 64, 4)


@pytest.mark.parametrize("prompt_device", ["auto", "cpu"])
@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_what_is_refused_before_loading_does_not_fit_by_token2wavs_check_and_the_number_named_does(
    stack: Stack, prompt_device: str
) -> None:
    for gib in (8, 12, 22.1, 24, 80, 141):
        card = gpus.Gpu("0", "", "card", gib, gib, "580", "9.0")
        for streams in (1, 8, 32, 48, 64, 96, 128, 256, 1024):
            try:
                gpus.require_room(stack.name, [card], streams, prompts=prompt_device == "auto")
            except gpus.GpuError as error:
                with pytest.raises(ValueError, match="max_streams"):
                    plan(stack, streams, gib, prompt_device)
                if fitting := re.search("<= ([0-9]+)", str(error)):
                    plan(stack, int(fitting[1]), gib, prompt_device)


def test_without_an_llm_on_the_gpu_its_share_is_this_processs() -> None:
    networks, own = official(stacks.DIT), limits(stacks.DIT, 64)
    alone, beside = (plan_memory(networks, own, EMPTY, 24, llm) for llm in (0.0, None))
    assert alone.own - beside.own == int(planned_llm_gib(64 + SPARE_REQUESTS) * GIB) == beside.parts["LLM"]


def test_prompt_models_on_the_cpu_leave_their_share() -> None:
    there, here = (plan(stacks.DIT, 4, 12, device) for device in ("auto", "cpu"))
    assert there.parts["prompt models"] == PROMPT_MODELS + TOKENIZERS["v2"] == here.own - there.own
    assert here.parts["server"] == SERVER
    with pytest.raises(ValueError, match=r"set prompt_device cpu or gpu_memory_gib >= [\d.]+\n"):
        plan(stacks.DIT, 4, 7.5)
    with pytest.raises(ValueError, match=r"set gpu_memory_gib >= [\d.]+\n"):
        plan(stacks.DIT, 4, 6, "cpu")
    with pytest.raises(ValueError, match=r"set gpu_memory_gib >= [\d.]+\n"):  # it would not be enough
        plan(stacks.DIT, 4, 5)


def test_without_a_limit_others_may_have_loaded_or_not() -> None:
    """What is free and the shares of all models are the server's, but no more than the GPU has."""
    networks, own, total = official(stacks.DIT), limits(stacks.DIT, 4), 24 * GIB
    shares = sum(plan(stacks.DIT, 4, 12).parts[name] for name in ("server", "LLM", "prompt models"))
    taken = total - 14 * GIB - PROCESS - shares  # by a stranger, and all models have loaded
    for free, memory in ((14 * GIB, total - taken), (total, total)):
        assert plan_memory(networks, own, Reading(free, total), None, None).memory == memory


def test_what_loading_leaves_of_the_share_is_for_voices(caplog: pytest.LogCaptureFixture) -> None:
    """Measured: also where others took what is this process's, and where the graphs took more than was estimated."""
    made = plan(stacks.DIT, 16, 24)
    loaded = Reading(free=20 * GIB, total=24 * GIB, reserved=3 * GIB)
    assert made.voices(loaded) == made.own - 3 * GIB - RESERVE
    assert made.voices(replace(loaded, free=5 * GIB)) == 5 * GIB - RESERVE
    assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == []
    few = replace(loaded, reserved=made.own - RESERVE - made.minimum // 2)
    assert made.voices(few) == made.minimum // 2
    assert "new voices may have to wait; set gpu_memory_gib >= " in caplog.messages[-1]
    with pytest.raises(ValueError, match=rf"one of {VOICE_SECONDS:g} s takes [\d.]+: set max_streams < 16 or gpu_mem"):
        made.voices(replace(loaded, reserved=made.own))


def test_a_loaded_engine_gives_voices_what_is_left(demo_files: Path) -> None:
    directory, sizes = demo_files / stacks.DIT.checkpoint, limits(stacks.DIT, 3)
    networks = Networks.read(stacks.DIT, directory, flow_size=4, vocoder_size=4, steps=2)
    made = plan_memory(networks, sizes, EMPTY, 24, 0.0)
    room = networks.voice(60 / 50)

    def fits(voices: int) -> list[bool]:
        engine = Token2Wav.load(
            stacks.DIT, directory, device="cpu", limits=sizes, precision=FLOAT32, runtime="torch", steps=2,
            plan=lambda _: replace(made, voice=0),
            read=lambda device: Reading(24 * GIB, 24 * GIB, made.own - RESERVE - voices),
        )  # fmt: skip
        return engine.fitting([VOICE, replace(VOICE, embedding=np.zeros(192, np.float32))])

    assert (fits(2 * room), fits(2 * room - 1)) == ([True, True], [True, False])


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_on_a_cpu_the_longest_voice_always_has_room(
    kept: KvCacheDtype, demo_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = demo_files / stacks.DIT.checkpoint
    config = Token2WavConfig(
        model_dir=str(directory), max_streams=2, n_timesteps=1, flow_precision="float32", kv_cache_dtype=kept
    )
    monkeypatch.setattr("os.sysconf", lambda _: 1)  # a machine with a byte
    engine = Token2Wav.from_config(stacks.DIT, config)
    longest = replace(VOICE, tokens=np.arange(752), mel=np.zeros((1504, 80), np.float32))
    assert engine.fitting([longest, replace(longest, embedding=np.zeros(192, np.float32))]) == [True, False]
    assert (engine.limits.workers, engine.workers) == (2, 1)  # without graphs there is one
    assert engine.limits.profile is profiles.CPU


def test_a_containers_memory_counts_not_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host_memory([])
    (version2 := tmp_path / "memory.max").write_text("max\n")
    (version1 := tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # there it means no limit
    assert machine > GIB and host_memory([version2, version1, tmp_path / "missing"]) == machine
    version2.write_text(f"{GIB}\n")
    assert host_memory([version2, version1]) == GIB
    version1.write_text(f"{GIB // 2}\n")
    assert host_memory([version2, version1]) == GIB // 2

    networks, sizes = official(stacks.DIT), limits(stacks.DIT, 2)
    monkeypatch.setattr("cosyvoice_triton.token2wav.gpu.memory.host_memory", lambda: 40 * GIB)
    assert voices_on_host(networks, sizes) == 20 * GIB - networks.weights - networks.streams(2)


# Of every function that a stack may have graphs of: their lengths, and the most of a batch.
FUNCTIONS = {
    "encoder": ("window_tokens", ENCODER_TOKENS),
    "unet": ("window_frames", UNET_FRAMES),
    "cosyvoice3": ("row_frames", COSYVOICE3_FRAMES),
    "dit": ("row_frames", DIT_FRAMES),
    "prompts": ("prompt_frames", PREFILL_FRAMES),
}


def graph_sizes(limits: BatchLimits) -> dict[str, list[tuple[int, ...]]]:
    sizes = {name: limits.sizes(getattr(limits, lengths), most) for name, (lengths, most) in FUNCTIONS.items()}
    made = GraphedRenderer(Mock(), limits, make=lambda *of, worker: of[2])._graphs
    return sizes | {f"vocoder, begun {begun}": of for begun, of in made.items()}


def lengths(prompt: int, offset: int, new: int, boundary: int) -> dict[str, int]:
    """What those graphs must hold for a chunk, and for the prompt of a first one."""
    window, frames = prompt + min(offset, CONTEXT_TOKENS) + new, TOKEN_MEL_RATIO * new
    # After a prompt, a flow with boundaries computes tokens of it that are not kept, and the look-ahead.
    anew = TOKEN_MEL_RATIO * ((prompt + offset) % boundary + LOOKAHEAD_TOKENS) if boundary > 1 else 0
    needed = {"encoder": window, "unet": TOKEN_MEL_RATIO * window, "dit": frames, "cosyvoice3": frames + anew}
    needed[f"vocoder, begun {offset > 0}"] = frames
    return needed if offset else {**needed, "prompts": TOKEN_MEL_RATIO * prompt}


@pytest.mark.parametrize("first_hop", [5, 15, 30, 100])
def test_graphs_for_starts_take_an_eighth_of_the_others_or_hold_one_chunk(first_hop):
    """Their memory is needed beside that of the others."""
    starts = BatchLimits(first_hop_tokens=first_hop).of_worker(FIRST_CHUNK_WORKER)
    for function, sizes in graph_sizes(starts).items():
        longest = max(T for _, T in sizes)
        most = FUNCTIONS[function][1] if function in FUNCTIONS else HIFT_FRAMES
        assert max(B * T for B, T in sizes) <= max(longest, most // 8), function


@pytest.mark.parametrize("strategy", get_args(ChunkStrategy))
@pytest.mark.parametrize("stack", stacks.names())
@pytest.mark.parametrize(("first_hop", "max_hop"), [(15, 100), (5, 50), (30, 200), (15, 25)])
def test_both_lanes_have_graphs_for_every_chunk_that_the_schedule_can_make(stack, first_hop, max_hop, strategy):
    """First chunks of a text for the one; all chunks of all of its segments for the other, in voices of any length."""
    boundary = stacks.named(stack).chunk_boundary
    limits = BatchLimits(chunk_boundary=boundary, first_hop_tokens=first_hop, max_hop_tokens=max_hop)
    longest = [{name: max(T for B, T in sizes if B == 1) for name, sizes in graph_sizes(of).items()}
               for of in limits.of_each_worker]  # fmt: skip
    rules = HopRules(strategy=strategy, first_hop=first_hop, max_hop=max_hop, boundary=boundary)
    firsts, seconds = (1, first_hop + 2, 3 * first_hop, 900), (*range(1, 40), *range(40, 260, 7))
    for prompt, silent, *ends in product((0, 3, 26, MAX_PROMPT_TOKENS), (0, ONSET_TOKENS), firsts, seconds):
        schedule = rules.schedule(prompt, lambda: 0.0, silent=silent)
        for segment, tokens in enumerate(ends):
            while (hop := schedule.next_hop(tokens, ended=True)) is not None:
                needed = lengths(prompt, hop.offset, hop.length, boundary)
                starts = hop.offset == 0 and hop.length <= limits.first_chunk_tokens
                assert starts or segment or hop.offset
                for worker in (CHUNK_WORKER, FIRST_CHUNK_WORKER) if starts else (CHUNK_WORKER,):
                    assert all(frames <= longest[worker][name] for name, frames in needed.items()), (hop, needed)
            schedule.begin_segment()


def test_a_first_chunk_is_at_most_the_longest_first_hop_and_what_the_final_one_adds():
    limits = BatchLimits(first_hop_tokens=15, chunk_boundary=25)
    assert limits.first_chunk_tokens == 39 + ONSET_TOKENS + LOOKAHEAD_TOKENS - 1
    assert limits.of_worker(FIRST_CHUNK_WORKER).first_chunk_tokens == limits.first_chunk_tokens


def test_a_batch_is_as_large_as_the_profile_says():
    numbers = Profile(scheduler=SchedulerNumbers(first_chunk_batch=3), limits=LimitNumbers(max_batch=5))
    limits = BatchLimits(profile=numbers)
    assert [of.max_chunks for of in limits.of_each_worker] == [5, 3]
    assert limits.sizes((32,), 1 << 20) == [(batch, 32) for batch in (1, 2, 4, 5)]


@pytest.mark.parametrize(
    ("max_streams", "batches"), [(1, (1,)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 24, 32)), (400, 8)]
)
def test_graphs_are_made_for_batches_that_the_streams_can_fill(max_streams, batches):
    made = {B for B, _ in BatchLimits(max_streams=max_streams).sizes((32,), 1 << 20)}
    assert made == set(batches) if isinstance(batches, tuple) else len(made) == batches


def test_a_hop_beyond_a_batch_is_refused_with_both_values():
    with pytest.raises(ValueError, match="max_hop_tokens 2100 makes chunks of 4208 mel frames; a batch holds 4096"):
        BatchLimits(max_hop_tokens=2100)


def test_a_batch_beyond_the_graphs_is_counted_as_its_two_halves():
    padded = padding([(32, 128), (24, 128), (8, 128), (64, 64)])
    assert [padded(chunks, 60) for chunks in (24, 32, 33, 34)] == [24 * 64, 32 * 64, 2 * 24 * 64, 2 * 24 * 64]
    assert padded(64, 30) == 64 * 32 and padded(130, 30) == 4 * 64 * 32  # 65 chunks are again two halves
    assert padded(3, 65) == 3 * 65  # longer than every graph: without padding
    assert padding([])(34, 60) == 34 * 60
