"""The plan of a GPU's memory: real sizes, what fits, what is refused with what."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.config import SPARE_REQUESTS, Token2WavConfig, planned_llm_gib
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS, TRAINED
from cosyvoice_triton.networks.flow import (
    CosyVoice3Flow,
    CosyVoice3FlowConfig,
    DiTFlow,
    DiTFlowConfig,
    UNetFlow,
    UNetFlowConfig,
)
from cosyvoice_triton.networks.hift import HiFTConfig, HiFTGenerator
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Precision, Token2Wav, _plan
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.encoder_fused import FusedEncoder
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory_plan import (
    FLOW_NOISE,
    GIB,
    GRAPH_INPUTS,
    LAUNCHES,
    PROCESS,
    PROMPT_MODELS,
    SERVER,
    VOICE_SECONDS,
    MemoryPlan,
    Networks,
    plan_memory,
)
from cosyvoice_triton.token2wav.vocoder.hift_fused import FusedBody
from cosyvoice_triton.voice.prompt import Prompt

FLOAT32 = Precision(torch.float32, torch.float32)
OFFICIAL = {
    stacks.DIT: (DiTFlow, DiTFlowConfig()),
    stacks.UNET: (UNetFlow, UNetFlowConfig()),
    stacks.COSYVOICE3: (CosyVoice3Flow, CosyVoice3FlowConfig()),
}


TOKENIZERS = {"v2": 495_900_000, "v3": 968_000_000}  # bytes


def official(stack: Stack, prompt_device: str = "auto") -> Networks:
    kind, config = OFFICIAL[stack]
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in kind(config).named_parameters()}
    return Networks(
        flow=config,
        shapes=shapes,
        vocoder=20_806_557,
        vocoder_stream=stack.vocoder_stream_bytes,
        noise=FLOW_NOISE + stack.vocoder_noise_bytes,
        flow_size=2,
        vocoder_size=2,
        steps=10,
        tokenizer=None if prompt_device == "cpu" else TOKENIZERS[stack.speech_tokenizer.split("_")[2][:2]],
    )


def limits(stack: Stack, streams: int) -> BatchLimits:
    return BatchLimits(max_streams=streams, chunk_boundary=stack.chunk_boundary)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_streams_voices_and_weights_have_the_planned_sizes(stack: Stack) -> None:
    directory = TRAINED / stack.checkpoint
    planned = Networks.read(stack, directory, flow_size=4, vocoder_size=4, steps=2)
    engine = Token2Wav.load(
        stack, directory, device="cpu", limits=limits(stack, 3), precision=FLOAT32, runtime="torch", steps=2
    )
    assert engine.cache_bytes == pytest.approx(planned.streams(3), rel=0.03)
    flow = engine._flow
    if isinstance(flow, CachedStreaming):
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in flow._network.parameters()}
        stream = engine.open(Prompt(np.arange(30), np.zeros((60, 80), np.float32), np.ones(192, np.float32), text=""))
        assert stream.prompt.nbytes == planned.voice(60 / 50)
        solver = flow._solve._solver
        weights |= {tensor.data_ptr(): tensor.nbytes for block in solver._blocks for tensor in block}
        vocoder = sum(tensor.nbytes for tensor in engine._vocoder._plain.hift.parameters())
        assert planned.weights - planned.noise == pytest.approx(sum(weights.values()) + vocoder, rel=0.05)


def test_the_plan_has_room_for_the_fused_vocoder() -> None:
    with torch.device("meta"):
        hift = HiFTGenerator(HiFTConfig()).half()
    unfused = replace(official(stacks.DIT), vocoder_size=4)
    planned = official(stacks.DIT).weights - (unfused.weights - unfused.vocoder * 2)
    tensors = _tensors(vars(FusedBody(hift)))
    assert 0.9 * planned < sum(tensor.nbytes for tensor in tensors) < planned


@pytest.mark.parametrize("stack", [stacks.DIT, stacks.UNET], ids=lambda stack: stack.name)
def test_the_plan_has_room_for_the_fused_encoder(stack: Stack) -> None:
    """It shares the other weights with the network."""
    own = limits(stack, 4)
    with torch.device("meta"):
        network = (DiTFlow(DiTFlowConfig()) if stack is stacks.DIT else UNetFlow(UNetFlowConfig())).half()
        fused = FusedEncoder(network, own.window_tokens[-1])
    shared = {id(parameter) for parameter in network.parameters()}
    made = sum(tensor.nbytes for tensor in _tensors(vars(fused)) if id(tensor) not in shared)
    assert 0.95 * official(stack).encoder(own) < made < 1.05 * official(stack).encoder(own)
    assert official(stacks.COSYVOICE3).encoder(own) == replace(official(stack), fused=False).encoder(own) == 0


def test_the_scores_of_an_encoder_that_is_not_fused_are_planned() -> None:
    fused, own = official(stacks.DIT), limits(stacks.DIT, 4)
    assert replace(fused, fused=False).batches(own) > fused.batches(own) + (100 << 20)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@pytest.mark.parametrize(
    ("stack", "gib", "streams"),
    [
        *((stacks.DIT, gib, streams) for gib, streams in ((10, 4), (13, 16), (17, 32), (25, 64), (48, 128))),
        (stacks.UNET, 8, 4),
        (stacks.UNET, 24, 32),
        (stacks.COSYVOICE3, 14, 7),
        (stacks.COSYVOICE3, 24, 22),
        (stacks.COSYVOICE3, 96, 128),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_each_gpu_holds_its_streams_in_as_many_voices(
    stack: Stack, gib: int, streams: int, caplog: pytest.LogCaptureFixture
) -> None:
    networks = official(stack)
    made = plan_memory(networks, limits(stack, streams), gib * GIB, None)
    assert made.voices >= streams * networks.voice(VOICE_SECONDS)
    assert sum(made.parts.values()) + made.voices == gib * GIB
    made.log()
    (table,) = caplog.messages  # whatever the level of the other loggers
    assert table.splitlines()[-1].split() == ["sum", f"{gib}.00", "GiB"]


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
    stack: Stack, gib: float, streams: int, prompt_device: str, workers: int
) -> None:
    """The table of docs/sizing.md."""
    networks, own = official(stack, prompt_device), limits(stack, streams)
    made = plan_memory(networks, own, int(gib * GIB), None)
    assert made.workers == workers
    graphs = networks.graphs(replace(own, workers=workers))
    assert (made.parts["graphs"], made.parts["process"]) == (graphs * GRAPH_INPUTS, PROCESS + graphs * LAUNCHES)
    assert ("first chunks would not wait" in str(made)) == (made.lacking > 0) == (workers == 1)
    if made.lacking:
        enough = plan_memory(networks, own, int(gib * GIB) + made.lacking, None)
        assert enough.workers == 2 and enough.voices >= streams * networks.voice(VOICE_SECONDS)
        assert plan_memory(networks, own, int(gib * GIB) + made.lacking - 1, None).lacking == 1


def test_streams_that_do_not_fit_are_refused_with_the_numbers_that_do() -> None:
    networks = official(stacks.DIT)
    with pytest.raises(
        ValueError, match=r"^max_streams 64 needs [\d.]+ GiB, and gpu_memory_gib is 12.0: set "
    ) as refused:
        plan_memory(networks, limits(stacks.DIT, 64), 12 * GIB, None)
    found = re.search(r"max_streams <= (\d+) or gpu_memory_gib >= ([\d.]+)", str(refused.value))
    assert found is not None
    fewer, more = int(found[1]), float(found[2])
    assert 16 <= fewer < 64 and 12 < more < 24
    plan_memory(networks, limits(stacks.DIT, fewer), 12 * GIB, None)
    plan_memory(networks, limits(stacks.DIT, 64), int(more * GIB), None)
    for streams, gib in ((fewer + 1, 12), (64, more - 0.2)):
        with pytest.raises(ValueError, match="gpu_memory_gib"):
            plan_memory(networks, limits(stacks.DIT, streams), int(gib * GIB), None)
    with pytest.raises(ValueError, match="set gpu_memory_gib >= "):  # no number of streams fits
        plan_memory(networks, limits(stacks.DIT, 64), 4 * GIB, None)


def test_without_an_llm_on_the_gpu_its_share_is_for_voices() -> None:
    networks = official(stacks.DIT)
    own = replace(limits(stacks.DIT, 64), workers=2)
    alone, beside = (plan_memory(networks, own, 24 * GIB, llm) for llm in (0.0, None))
    assert alone.voices - beside.voices == int(planned_llm_gib(64 + SPARE_REQUESTS) * GIB) == beside.parts["LLM"]
    assert beside.own == beside.voices + sum(
        size for name, size in beside.parts.items() if name not in ("server", "LLM", "prompt models", "process")
    )


def test_prompt_models_on_the_cpu_leave_their_share_to_voices() -> None:
    own = limits(stacks.DIT, 4)
    there, here = (plan_memory(official(stacks.DIT, device), own, 12 * GIB, None) for device in ("auto", "cpu"))
    assert there.parts["prompt models"] == PROMPT_MODELS + TOKENIZERS["v2"]
    assert here.voices - there.voices == there.parts["prompt models"] and here.parts["server"] == SERVER
    with pytest.raises(ValueError, match=r"set prompt_device cpu or gpu_memory_gib >= [\d.]+\n"):
        plan_memory(official(stacks.DIT), own, int(7.5 * GIB), None)
    with pytest.raises(ValueError, match=r"set gpu_memory_gib >= [\d.]+\n"):
        plan_memory(official(stacks.DIT, "cpu"), own, 6 * GIB, None)
    with pytest.raises(ValueError, match=r"set gpu_memory_gib >= [\d.]+\n"):  # it would not be enough
        plan_memory(official(stacks.DIT), own, 5 * GIB, None)


def test_on_a_cpu_the_longest_voice_always_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = TRAINED / stacks.DIT.checkpoint
    config = Token2WavConfig(model_dir=str(directory), max_streams=2, n_timesteps=1, flow_precision="float32")
    monkeypatch.setattr("os.sysconf", lambda _: 1)  # a machine with a byte
    engine = Token2Wav.from_config(stacks.DIT, config)
    longest = Prompt(np.arange(752), np.zeros((1504, 80), np.float32), np.ones(192, np.float32), text="")
    assert engine.fitting([longest, replace(longest, embedding=np.zeros(192, np.float32))]) == [True, False]
    assert (engine.limits.workers, engine.workers) == (2, 1)  # without graphs there is one


def test_a_gpu_has_as_many_lanes_and_voices_as_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = TRAINED / stacks.DIT.checkpoint
    config = Token2WavConfig(model_dir=str(directory), device="cuda:0", gpu_memory_gib=8.0)
    parts = {"server": GIB, "LLM": GIB, "prompt models": 0, "process": GIB}
    planned = MemoryPlan(8 * GIB, parts, voice=GIB, workers=2)
    shares: list[float] = []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (15 * GIB, 16 * GIB))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, device: shares.append(share))
    wanted: list[int] = []
    monkeypatch.setattr(
        "cosyvoice_triton.token2wav.engine.plan_memory",
        lambda networks, limits, *_: wanted.append(limits.workers) or planned,
    )
    own = limits(stacks.DIT, 4)
    assert _plan(stacks.DIT, config, own, Precision(torch.float16, torch.float16)) == (replace(own, workers=2), 5 * GIB)
    assert shares == [5 / 16]
    _plan(stacks.DIT, replace(config, flow_runtime="tensorrt"), own, Precision(torch.float16, torch.float16))
    assert wanted == [2, 1]  # without CUDA graphs of the flow there is one


def test_where_one_worker_is_wanted_none_is_lacking() -> None:
    own = replace(limits(stacks.DIT, 4), workers=1)
    made = plan_memory(official(stacks.DIT, "cpu"), own, int(7.5 * GIB), None)
    assert (made.workers, made.lacking) == (1, 0) and "first chunks" not in str(made)


def test_the_settings_have_the_models_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gpu_memory_gib' must be above 0, not -1"):
        Token2WavConfig(model_dir=str(tmp_path), gpu_memory_gib=-1)
