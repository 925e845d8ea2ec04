"""TensorRT plans: built by the real TensorRT for RTX, and run by a fake that computes their ONNX networks.
In half precision these keep everything but the flow time, and masks make no infinities."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.export import engines, precision
from cosyvoice_triton.export.engines import BuildError
from cosyvoice_triton.runtimes import tensorrt
from cosyvoice_triton.runtimes.signatures import Workload, workloads
from cosyvoice_triton.runtimes.tensorrt import Plan, PlanError, TensorRTNetwork, log_of
from torch import Tensor

from tests.support import fake_tensorrt, tiny_onnx

WHOLE, PROMPT, CHUNK, SPEAKER = range(4)


@pytest.fixture
def dit(tmp_path: Path) -> Path:
    return tiny_onnx.write_stack(tmp_path / "dit", stacks.DIT)


def of(index: int, precision: str = "float32") -> Workload:
    return workloads(stacks.DIT, precision)[index]


@pytest.mark.parametrize("stack, count, precision", [("dit", 4, "float16"), ("unet", 3, "float32")])
def test_every_plan_of_a_stack_is_built_once_for_each_capability(capsys, tmp_path, stack, count, precision) -> None:
    model_dir = tiny_onnx.write_stack(tmp_path, stacks.named(stack))
    for printed in ("not compared", "exists already"):
        assert engines.build_all(stacks.named(stack), model_dir, precision, ["8.6", "12.0"], "cpu")
        out, err = capsys.readouterr()
        assert err == "" and out.count(printed) == 2 * count
    for workload in workloads(stacks.named(stack), precision):
        assert len(Plan.of(workload, model_dir, tensorrt.target("8.6")).read()) > 1000
        with pytest.raises(PlanError, match="does not exist, or .*; build it as docs/gpu.md describes"):
            Plan.of(workload, model_dir, tensorrt.target("8.9")).read()


def test_a_plan_is_built_again_for_another_onnx_file_and_after_an_interruption(dit: Path) -> None:
    plan = Plan.of(of(CHUNK), dit, "machine")
    plan.write(b"plan")
    assert plan.read() == b"plan" and Plan.of(of(CHUNK), dit, "machine").problem() == ""
    tiny_onnx.write_estimator(dit / of(CHUNK).onnx)
    with pytest.raises(PlanError, match="was built for onnx flow.decoder.* [0-9a-f]{64}, not flow"):
        Plan.of(of(CHUNK), dit, "machine").read()
    plan.path.with_suffix(".json").unlink()
    assert "what it was built from is not recorded" in plan.problem()


def test_the_real_library_refuses_damaged_plans_and_cannot_load_good_ones_without_a_driver(dit: Path) -> None:
    trt = tensorrt.tensorrt()
    plan = engines.build(dit / of(SPEAKER).onnx, of(SPEAKER), "8.9")
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    runtime = trt.Runtime(log_of(trt))
    assert runtime.get_engine_validity(b"x" * 100)[1] & malformed
    assert not runtime.get_engine_validity(plan)[1] & malformed
    with pytest.raises(PlanError, match="TensorRT refuses the plan of speaker: .*CUDA driver version"):
        TensorRTNetwork(plan, "speaker", "cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install(monkeypatch)


def chunk_inputs(rows: int, frames: int, cached: int) -> dict[str, Tensor]:
    x, mu, cond = torch.randn(3, rows, 80, frames)
    caches = {"cnn_cache": torch.randn(2, rows, 8, 2), "att_cache": torch.randn(2, rows, 2, cached, 4)}
    return {"x": x, "mu": mu, "t": torch.rand(rows), "spks": torch.randn(rows, 80), "cond": cond} | caches


def test_the_fake_has_no_name_that_the_real_bindings_lack() -> None:
    bindings = tensorrt.tensorrt()
    for kind in fake_tensorrt.CLASSES:
        ours = {name for name in vars(kind) if not name.startswith("_")}
        if kind is fake_tensorrt.IExecutionContext or kind is fake_tensorrt.ICudaEngine:
            ours -= {"wrong_by"}
        assert ours <= set(dir(getattr(bindings, kind.__name__))), kind


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("wrong_by", [0.0, float("nan")])
def test_a_plan_for_this_gpu_is_kept_only_if_it_computes_what_its_onnx_file_does(dit, monkeypatch, wrong_by) -> None:
    monkeypatch.setattr(tensorrt, "machine", lambda device: "here")
    monkeypatch.setattr(engines, "build", lambda onnx, workload, capability: fake_tensorrt.plan(onnx, workload))
    monkeypatch.setattr(fake_tensorrt.IExecutionContext, "wrong_by", wrong_by)
    if wrong_by == 0:
        assert engines.build_missing(dit, of(CHUNK), "cpu", "").startswith("built chunk-float32-here.plan, ")
        assert TensorRTNetwork.load(of(CHUNK), dit, "cpu").run(chunk_inputs(2, 4, 0))
    else:
        with pytest.raises(BuildError, match="is wrong: output is .* away from the ONNX file, 5 % is the limit; try"):
            engines.build_missing(dit, of(CHUNK), "cpu", "")
        assert not (dit / tensorrt.FOLDER).exists()


def feeds(frames: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(frames)
    x, mu, cond = rng.standard_normal((3, 2, 80, frames))
    mask = np.ones((2, 1, frames))
    mask[1] = 0  # a row that is all padding
    values = {"x": x, "mask": mask, "mu": mu, "t": np.array([0.1, 0.9])}
    values |= {"spks": rng.standard_normal((2, 80)), "cond": cond}
    return {name: value.astype(np.float32) for name, value in values.items()}


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative RMS error of the first row; the row of padding has to be finite."""
    found = found.astype(np.float32)
    assert np.isfinite(found).all()
    return float(np.sqrt(np.mean((found - expected)[0] ** 2) / np.mean(expected[0] ** 2)))


def cast(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value if name == precision.TIME else value.astype(np.float16) for name, value in values.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny_onnx.write_estimator(tmp_path / "estimator.onnx")
    return tmp_path / "estimator.onnx"


def test_half_precision_equals_float32_up_to_rounding(path: Path) -> None:
    values = feeds(30)
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, values)
    model = precision.read(path, "float16")
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    (found,) = onnxruntime.InferenceSession(model).run(None, cast(values))
    assert found.dtype == np.float16
    assert error(found, expected) < 1e-3


def test_float32_returns_the_file_unchanged_and_files_of_other_formats_are_refused(path: Path, tmp_path: Path) -> None:
    assert onnx.load_from_string(precision.read(path, "float32")) == onnx.load(str(path))
    (tmp_path / "not.onnx").write_bytes(b"\xff")
    for name in ("not.onnx", "missing.onnx"):
        with pytest.raises(ValueError, match=f"{name} is not an ONNX file"):
            precision.read(tmp_path / name, "float16")
