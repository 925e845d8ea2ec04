"""Precision of flow and vocoder: what `auto` chooses, the comparison of a checkpoint before it is served, and what keys
and values in 8 bits cost in error, also over a long stream; test_memory has what they save. Weights with the traps that
others found in official ones: no stack speaks noise in a format that it chooses."""

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.constants import MEL_BINS, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.monitoring.environment import TEST_FAULTS
from cosyvoice_triton.monitoring.metrics import FALLBACKS
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.gpu import precision
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import LIMITS, Precision
from cosyvoice_triton.token2wav.gpu.quantization import dequantized
from cosyvoice_triton.token2wav.stream import VocoderState
from torch import Tensor

from tests.random_weights.token2wav import COSYVOICE3_FLOW, HIFT, write_flow, write_hift
from tests.support.streams import ids, mel, overflowing, pieces, prompt, saved

FLOAT32, HALF = Precision(torch.float32, torch.float32), Precision(torch.float16, torch.float16)
BFLOAT16_FLOW = Precision(torch.bfloat16, torch.float32)
AUTO_HALF = replace(HALF, automatic=frozenset({"flow", "vocoder"}))
LIMITED: dict[str, Any] = {"limits": BatchLimits(max_streams=2), "steps": 2}
WITHOUT, WITH = {"avx512_bf16": False, "amx_bf16": False, "avx2": True}, {"avx512_bf16": True, "avx512_f": True}


@pytest.mark.parametrize(
    ("cpu", "asked", "expected"),
    [
        (WITHOUT, ("auto", "auto", "cpu"), FLOAT32),
        ({"architecture": "aarch64"}, ("auto", "auto", "cpu"), FLOAT32),
        (WITH, ("auto", "auto", "cpu"), BFLOAT16_FLOW),
        ({"amx_bf16": True}, ("auto", "auto", "cpu", "torch"), BFLOAT16_FLOW),
        (WITH, ("auto", "auto", "cpu", "onnxruntime"), FLOAT32),
        (WITH, ("auto", "auto", "cuda:0"), HALF),
        (WITH, ("auto", "auto", "cuda:0", "onnxruntime"), HALF),
        (WITH, ("float32", "bfloat16", "cpu"), Precision(torch.float32, torch.bfloat16)),
    ],
)
def test_auto_is_the_fastest_format_of_the_device_and_a_named_one_is_used(cpu, asked, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert Precision.named(*asked) == expected


@pytest.mark.parametrize(("flow", "vocoder", "named"), [("bfloat16", "auto", "flow"), ("auto", "bfloat16", "vocoder")])
def test_bfloat16_is_refused_on_a_gpu_that_does_not_compute_in_it(monkeypatch, flow, vocoder, named):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=f"^{named}_precision bfloat16: a GPU of compute capability 7.5 "):
        Precision.named(flow, vocoder, "cuda:0")
    assert Precision.named("auto", "auto", "cuda:0") == HALF
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert getattr(Precision.named(flow, vocoder, "cuda:0"), named) == torch.bfloat16


def checked(directory: Path, precision: Precision, stack: Stack = stacks.DIT) -> Precision:
    return precision.checked(stack, directory, "cpu", **LIMITED)


def engine(stack: Stack, directory: Path, precision: Precision, **options: Any) -> Token2Wav:
    return Token2Wav.load(stack, directory, device="cpu", precision=precision, **LIMITED, **options)


def test_what_has_passed_is_compared_again_only_if_what_it_depends_on_changes(
    tmp_path, dit_network, vocoder, caplog, monkeypatch
):
    """A start-up waits seconds for it. A warning is repeated at every start."""
    caplog.set_level(logging.INFO)
    directory = saved(tmp_path, dit_network, vocoder._network)
    given = LIMITED | {"notes": tmp_path / "notes"}

    def compared(asked: Precision = AUTO_HALF, stack: Stack = stacks.DIT, **others: Any) -> int:
        caplog.clear()
        asked.checked(stack, directory, "cpu", **given | others)
        return sum("RMS error" in line for line in caplog.messages)

    assert [compared(HALF), compared(HALF), compared(), compared()] == [2, 2, 2, 0]
    assert compared(notes=tmp_path / ("long" * 99)) == 2, "a folder that cannot be used is not an error"
    assert compared(replace(AUTO_HALF, flow=torch.bfloat16)) == compared(steps=3) == 2
    assert compared(stack=replace(stacks.DIT, mel_max_hz=7000.0)) == 2
    for module, name, other in ((torch, "__version__", "1.0"), (precision, "CODE", tmp_path)):
        monkeypatch.setattr(module, name, other)
        assert [compared(), compared()] == [2, 0], name
    saved(tmp_path, overflowing(dit_network), vocoder._network)
    assert [compared(), compared()] == [3, 3]


def test_a_start_logs_its_stages_and_keeps_notes_beside_compiled_kernels(
    tmp_path, dit_network, vocoder, caplog, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    directory = saved(tmp_path, dit_network, vocoder._network)
    config = Token2WavConfig(model_dir=str(directory), max_streams=2, n_timesteps=1)
    for notes in (1, 1):
        caplog.clear()
        Token2Wav.from_config(stacks.DIT, config)
        assert len(list((tmp_path / "kernels").iterdir())) == notes
        stages = [record.getMessage() for record in caplog.records if record.name.endswith(".starts")]
        assert [stage.split(":")[0] for stage in stages] == ["precision", "flow", "vocoder", "other workers"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_HOME", "/elsewhere")
    assert precision.kept_notes() == Path("/elsewhere/.triton/cache"), "as Triton does"


def test_a_flow_that_overflows_computes_in_bfloat16_unless_it_was_asked_for(tmp_path, dit_network, vocoder, caplog):
    directory = saved(tmp_path, overflowing(dit_network), vocoder._network)
    assert checked(directory, AUTO_HALF) == Precision(torch.bfloat16, torch.float16)
    assert (
        "flow.pt in torch.float16: RMS error nan of a fixed utterance, limit 0.05: the flow computes in bfloat16"
        in (caplog.text)
    )
    with pytest.raises(ValueError, match=r"flow\.pt in torch\.float16: RMS error nan .*: set flow_precision to auto"):
        checked(directory, HALF)


def test_a_precision_that_was_asked_for_is_obeyed_with_a_warning(tmp_path, dit_network, vocoder, caplog, monkeypatch):
    directory = saved(tmp_path, dit_network, vocoder._network)
    monkeypatch.setitem(LIMITS, "vocoder", 1e-9)
    assert checked(directory, HALF) == HALF
    assert "limit 1e-09; vocoder_precision asks for it" in caplog.text
    assert checked(directory, AUTO_HALF) == Precision(torch.float16, torch.float32)


@pytest.mark.parametrize("file", ["flow.pt", "hift.pt"])
@pytest.mark.parametrize("precision", [FLOAT32, AUTO_HALF])
def test_a_checkpoint_that_speaks_no_numbers_does_not_load(file, precision, tmp_path, dit_network, vocoder):
    """All its weights are numbers."""
    flow, hift = copy.deepcopy(dit_network), copy.deepcopy(vocoder._network)
    bias: Any = flow.decoder.estimator.final_layer.linear.bias if file == "flow.pt" else hift.conv_pre.bias
    bias[:2] = torch.tensor([3e38, -3e38])
    directory = saved(tmp_path, flow, hift)
    with pytest.raises(ValueError, match=rf"checkpoint .*{file}: .* not finite"):
        engine(stacks.DIT, directory, precision).warm_up()


@pytest.mark.parametrize(("file", "tensor"), [("flow.pt", "encoder_proj.bias"), ("hift.pt", "conv_post.bias")])
def test_a_checkpoint_with_weights_that_are_no_numbers_is_named(file, tensor, tmp_path, dit_network, vocoder):
    saved(tmp_path, dit_network, vocoder._network)
    state = torch.load(tmp_path / file)
    state[tensor][0] = torch.nan
    torch.save(state, tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file} has values that are not finite in '{tensor}'"):
        engine(stacks.DIT, tmp_path, FLOAT32)


ERROR = 1e-3  # RMS, relative to the mel's: twice what is found; a network's format may have 5e-2 (gpu/precision.py)
HOPS = [15, 60, 100, 175, 200]


@pytest.fixture(params=["dit", "cosyvoice3"])
def flows(request: pytest.FixtureRequest, flow_of: Callable[..., CachedStreaming]) -> list[CachedStreaming]:
    """The same flow with keys and values in its own format and in 8 bits."""
    load_exact = partial(copy.deepcopy, request.getfixturevalue(f"{request.param}_network"))
    return [flow_of(request.param, steps=2, kv_cache_dtype=of, load_exact=load_exact) for of in ("auto", "int8")]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def test_eight_bits_change_the_mel_hardly_and_no_more_at_the_end_of_30_seconds(flows: list[CachedStreaming]) -> None:
    whole, rounded = (mel(flow, prompt(1, tokens=31), ids(1, 30 * TOKEN_RATE), HOPS) for flow in flows)
    parts = [error(*pair) for pair in zip(rounded.split(500, dim=1), whole.split(500, dim=1), strict=True)]
    assert 0 < max(parts) < ERROR and parts[-1] < 2 * parts[0]


@torch.inference_mode()
def test_what_is_not_finite_is_seen_and_made_again_in_eight_bits(flows, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(TEST_FAULTS, str(tmp_path))
    flow = flows[1]
    stream = flow.open(prompt(1, tokens=30), VocoderState(0))
    good, bad = stream.prompt.attention.keys.clone(), stream.prompt.attention.keys
    (tmp_path / "nan_voice").touch()
    chunk = pieces(flow, ids(1, 60), [15])[0].of(flow, stream)
    assert not flow.render([chunk])[0].isfinite().all()
    assert flow.again(chunk).isfinite().all()
    assert stream.prompt.attention.keys is not bad
    levels = dequantized(stream.prompt.attention.keys, torch.float32)
    torch.testing.assert_close(levels, dequantized(good, torch.float32), atol=0.05, rtol=0)


def test_eight_bits_are_refused_for_a_flow_that_keeps_no_keys_and_values() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype 'int8': the flow of the stack 'unet' keeps no keys and val"):
        engine(stacks.UNET, TRAINED / stacks.UNET.checkpoint, FLOAT32, kv_cache_dtype="int8")


# Whose output joins the residual stream first.
FIRST = {
    "dit": "decoder.estimator.blocks.0.attn.proj",
    "unet": "decoder.estimator.down_blocks.0.1.0.attn1.to_out.0",
    "cosyvoice3": "decoder.estimator.transformer_blocks.0.attn.to_out.0",
}
State = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(demo_files: Path, tmp_path: Path) -> Callable[[Stack], Path]:
    """Makes a directory with a stack's networks, of CosyVoice3 untrained ones, and of the demo voice its encoders."""

    def make(stack: Stack) -> Path:
        if stack is stacks.COSYVOICE3:
            write_flow(tmp_path / stack.flow, stack, 1, COSYVOICE3_FLOW)
            write_hift(tmp_path / stack.hift, stack, 2, HIFT)
            return tmp_path
        for file in (demo_files / stack.checkpoint).iterdir():
            os.symlink(file, tmp_path / file.name)
        return tmp_path

    return make


def change(path: Path, edit: Callable[[State], None]) -> None:
    state: State = torch.load(path, weights_only=True)
    edit(state)
    path.unlink()
    torch.save(state, path)


def grown(stack: Stack, factor: float) -> Callable[[State], None]:
    def edit(state: State) -> None:
        for part in ("weight", "bias"):
            key = f"{FIRST[stack.name]}.{part}"
            state[key] = state[key].float() * factor

    return edit


def tiny_alphas(state: State) -> None:
    for key in [key for key in state if key.endswith("alpha")]:
        state[key] = state[key].float()
        state[key][::3] = 1.6e-6


@pytest.mark.slow
@pytest.mark.parametrize("stack", [stacks.DIT, stacks.UNET, stacks.COSYVOICE3], ids=lambda stack: stack.name)
def test_a_stack_speaks_with_trapped_weights_in_the_fastest_format_that_holds(stack, checkpoint, caplog) -> None:
    directory = checkpoint(stack)

    def in_more_bits() -> float:
        served, exact = (engine(stack, directory, each) for each in (AUTO_HALF, FLOAT32))
        voice = prompt(3, 40)
        voice = replace(voice, embedding=np.resize(voice.embedding, exact.sample()[0].embedding.shape))
        audio, wanted = (each.whole(voice, ids(4, 20)) for each in (served, exact))
        assert np.isfinite(audio).all()
        assert np.abs(audio).mean() == pytest.approx(np.abs(wanted).mean(), rel=0.3)
        return served.counts[FALLBACKS]

    change(directory / stack.hift, tiny_alphas)
    change(directory / stack.flow, grown(stack, 2.0**10))  # squares of a layer norm's input pass float16's range
    assert in_more_bits() == 0
    change(directory / stack.flow, grown(stack, 2.0**10))  # now they pass it themselves
    assert in_more_bits() == 1 and "the flow computes in bfloat16" in caplog.text
    assert "computes in float32" not in caplog.text


def test_the_check_at_load_hears_a_real_prompt(checkpoint) -> None:
    """Without one, these weights are multiplied by zeros."""
    directory, stack = checkpoint(stacks.DIT), stacks.DIT

    def of_the_prompts_mel(state: State) -> None:
        key = "decoder.estimator.in_proj.weight"
        state[key] = state[key].float()
        state[key][:, 3 * MEL_BINS :] *= 2.0**16

    change(directory / stack.flow, of_the_prompts_mel)
    assert checked(directory, AUTO_HALF).flow == torch.bfloat16
