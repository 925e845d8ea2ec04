"""TensorRT plans: built by the real TensorRT for RTX, and run by a fake that computes their ONNX networks."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.export import engines
from cosyvoice_triton.export.engines import BuildError
from cosyvoice_triton.runtimes import plans
from cosyvoice_triton.runtimes.plans import Plan, PlanError
from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork, log_of
from cosyvoice_triton.runtimes.workloads import Workload, workloads
from torch import Tensor

from tests.support import fake_tensorrt, tiny_onnx

WHOLE, PROMPT, CHUNK, SPEAKER = range(4)


@pytest.fixture
def dit(tmp_path: Path) -> Path:
    return tiny_onnx.write_stack(tmp_path / "dit", stacks.DIT)


def of(index: int, precision: str = "float32") -> Workload:
    return workloads(stacks.DIT, precision)[index]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = engines.main(["--model-dir", *map(str, arguments)])
    return code, *capsys.readouterr()


# --- building, with the real library ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stack, count, precision", [("dit", 4, "float16"), ("unet", 3, "float32")])
def test_every_plan_of_a_stack_is_built_once_for_each_capability(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stack: str, count: int, precision: str
) -> None:
    model_dir = tiny_onnx.write_stack(tmp_path, stacks.named(stack))
    command = (model_dir, "--precision", precision, "--capability", "8.6", "12.0")
    code, out, err = run(capsys, *command)
    assert (code, err) == (0, "") and out.count("not compared") == 2 * count
    code, out, _ = run(capsys, *command)
    assert code == 0 and out.count("exists already") == 2 * count
    for workload in workloads(stacks.named(stack), precision):
        assert len(Plan.of(workload, model_dir, plans.target("8.6")).read()) > 1000
        with pytest.raises(PlanError, match="does not exist, or .*; build it as docs/gpu.md describes"):
            Plan.of(workload, model_dir, plans.target("8.9")).read()


def test_a_plan_is_built_again_for_another_onnx_file_and_after_an_interruption(dit: Path) -> None:
    plan = Plan.of(of(CHUNK), dit, "machine")
    plan.write(b"plan")
    assert plan.read() == b"plan" and Plan.of(of(CHUNK), dit, "machine").problem() == ""
    tiny_onnx.write_estimator(dit / of(CHUNK).onnx)
    with pytest.raises(PlanError, match="was built for onnx flow.decoder.* [0-9a-f]{64}, not flow"):
        Plan.of(of(CHUNK), dit, "machine").read()
    plan.path.with_suffix(".json").unlink()
    assert "what it was built from is not recorded" in plan.problem()


def test_a_plan_that_cannot_be_built_fails_alone_with_tensorrts_reason(
    capsys: pytest.CaptureFixture[str], dit: Path
) -> None:
    model = onnx.load(str(dit / of(WHOLE).onnx))
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "Bernoulli"
    del softmax.attribute[:]
    onnx.save(model, str(dit / of(WHOLE).onnx))
    (dit / of(PROMPT).onnx).write_bytes(b"\xff not ONNX")  # the file of two uses
    code, out, err = run(capsys, dit, "--capability", "8.9")
    assert code == 1 and "TensorRT cannot read" in err and "Bernoulli" in err
    assert err.count("is not an ONNX file") == 2 and out.count("built ") == 1
    with pytest.raises(BuildError, match=r"built no plan of campplus.onnx: .*Turing.*FP32 GEMM is not supported"):
        engines.build(dit / "campplus.onnx", of(SPEAKER), "7.5")


def test_a_file_of_a_fixed_batch_size_is_refused_with_a_remedy(dit: Path) -> None:
    tiny_onnx.write_estimator(dit / of(WHOLE).onnx, rows=2)
    with pytest.raises(ValueError, match=r"input 'x' is \(2, 80, -1\), where serving varies the axes \[0, 2\]; remove"):
        engines.build(dit / of(WHOLE).onnx, of(WHOLE), "8.9")


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "there is no GPU: name the --capability of the one that will serve"),
        (("--capability", "9.0"), "builds no plans for compute capability 9.0, only for 7.5, 8.0, 8.6, 8.9"),
    ],
)
def test_a_target_that_cannot_be_built_for_is_named(
    capsys: pytest.CaptureFixture[str], dit: Path, options: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, dit, *options)
    assert code == 1 and message in err


def test_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cosyvoice-triton export onnx" in run(capsys, tmp_path)[2]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "TensorRT is not installed; " in run(capsys, tmp_path)[2]


def test_the_real_library_refuses_damaged_plans_and_cannot_load_good_ones_without_a_driver(dit: Path) -> None:
    trt = plans.tensorrt()
    plan = engines.build(dit / of(SPEAKER).onnx, of(SPEAKER), "8.9")
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    runtime = trt.Runtime(log_of(trt))
    assert runtime.get_engine_validity(b"x" * 100)[1] & malformed
    assert not runtime.get_engine_validity(plan)[1] & malformed
    with pytest.raises(PlanError, match="TensorRT refuses the plan of speaker: .*CUDA driver version"):
        TensorRTNetwork(plan, "speaker", "cpu")


# --- loading and running, with the fake -------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install(monkeypatch)


def chunk_inputs(rows: int, frames: int, cached: int) -> dict[str, Tensor]:
    x, mu, cond = torch.randn(3, rows, 80, frames)
    caches = {"cnn_cache": torch.randn(2, rows, 8, 2), "att_cache": torch.randn(2, rows, 2, cached, 4)}
    return {"x": x, "mu": mu, "t": torch.rand(rows), "spks": torch.randn(rows, 80), "cond": cond} | caches


def by_onnxruntime(path: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {name: x.numpy() for name, x in inputs.items()})
    return {name: torch.from_numpy(x) for name, x in zip(names, outputs, strict=True)}


def test_the_fake_has_no_name_that_the_real_bindings_lack() -> None:
    bindings = plans.tensorrt()
    for kind in fake_tensorrt.CLASSES:
        ours = {name for name in vars(kind) if not name.startswith("_")}
        if kind is fake_tensorrt.IExecutionContext or kind is fake_tensorrt.ICudaEngine:
            ours -= {"wrong_by"}
        assert ours <= set(dir(getattr(bindings, kind.__name__))), kind


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-6), ("float16", 1e-2)])
def test_outputs_equal_those_of_the_onnx_file_for_empty_and_grown_caches(
    dit: Path, precision: str, tolerance: float
) -> None:
    path, workload = dit / of(CHUNK).onnx, of(CHUNK, precision)
    network = TensorRTNetwork(fake_tensorrt.plan(path, workload), "chunk", "cpu")
    for rows, frames, cached in ((2, 4, 0), (4, 10, 7), (2, 6, 100)):
        inputs = chunk_inputs(rows, frames, cached)
        found = network.run(inputs | {"x": inputs["x"].transpose(1, 2).contiguous().transpose(1, 2)})
        for name, expected in by_onnxruntime(path, inputs).items():
            assert found[name].dtype == getattr(torch, precision)
            torch.testing.assert_close(found[name].float(), expected, rtol=tolerance, atol=tolerance)
    assert network.limits.least["att_cache"] == (2, 2, 2, 0, 4)
    assert network.limits.most["att_cache"] == (2, 32, 2, 1600, 4) and network.limits.most["x"] == (32, 80, 206)


@pytest.mark.usefixtures("fake")
def test_threads_take_turns_and_only_the_call_outside_the_profile_is_refused(dit: Path) -> None:
    path = dit / of(CHUNK).onnx
    network = TensorRTNetwork(fake_tensorrt.plan(path, of(CHUNK)), "chunk", "cpu")
    inputs = [chunk_inputs(2, 207 if number == 3 else 10 + number, 5) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(network.run, each) for each in inputs]
    with pytest.raises(ValueError, match=r"\(2, 80, 207\): the network takes .* to \(32, 80, 206\)"):
        calls.pop(3).result()
    for each, call in zip(inputs[:3] + inputs[4:], calls, strict=True):
        torch.testing.assert_close(call.result()["output"], by_onnxruntime(path, each)["output"])


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "call, answer, message",
    [
        ("set_input_shape", False, r"TensorRT refuses x \(2, 80, 4\): TensorRT gave no reason"),
        ("infer_shapes", ["x"], "cannot infer the shapes"),
        ("set_tensor_address", False, "TensorRT refuses the address of x"),
        ("execute_async_v3", False, "TensorRT did not run"),
    ],
)
def test_every_failure_that_tensorrt_returns_is_an_error_of_that_call_alone(
    dit: Path, monkeypatch: pytest.MonkeyPatch, call: str, answer: object, message: str
) -> None:
    network = TensorRTNetwork(fake_tensorrt.plan(dit / of(CHUNK).onnx, of(CHUNK)), "chunk", "cpu")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=message):
        patch.setattr(fake_tensorrt.IExecutionContext, call, lambda *_: answer)
        network.run(chunk_inputs(2, 4, 0))
    network.run(chunk_inputs(2, 4, 0))


@pytest.mark.usefixtures("fake")
def test_a_plan_that_tensorrt_refuses_is_an_error_with_its_reason() -> None:
    with pytest.raises(
        PlanError, match="refuses the plan of x: the engine plan file is not compatible; build it again"
    ):
        TensorRTNetwork(b"garbage", "x", "cpu")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("wrong_by", [0.0, 10.0, float("nan")])
def test_a_plan_for_this_gpu_is_kept_only_if_it_computes_what_its_onnx_file_does(
    dit: Path, monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    monkeypatch.setattr(plans, "machine", lambda device: "here")
    monkeypatch.setattr(engines, "build", lambda onnx, workload, capability: fake_tensorrt.plan(onnx, workload))
    monkeypatch.setattr(fake_tensorrt.IExecutionContext, "wrong_by", wrong_by)
    if wrong_by == 0:
        assert engines.build_missing(dit, of(CHUNK), "cpu", "").startswith("built chunk-float32-here.plan, ")
        assert TensorRTNetwork.load(of(CHUNK), dit, "cpu").run(chunk_inputs(2, 4, 0))
    else:
        with pytest.raises(BuildError, match="is wrong: output is .* away from the ONNX file, 5 % is the limit; try"):
            engines.build_missing(dit, of(CHUNK), "cpu", "")
        assert not (dit / plans.FOLDER).exists()
