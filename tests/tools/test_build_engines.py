"""The module export.engines with small ONNX networks: plans built by the real tensorrt_rtx, for other GPUs.

Comparing a plan needs a driver: that part runs on the fake TensorRT, which computes the plans' networks.
"""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.export import builder
from cosyvoice_triton.export import engines as build_engines
from cosyvoice_triton.export.builder import Build, BuildError
from cosyvoice_triton.runtimes import editions, plans
from cosyvoice_triton.runtimes.plans import Key, Machine, PlanError
from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork, log_of
from cosyvoice_triton.runtimes.workloads import Serving, Workload
from tqdm import tqdm

from tests.support import fake_tensorrt, tiny_onnx

Run = Callable[..., tuple[int, str, str]]
L4 = ("--capability", "8.9")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the tool; returns its exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = build_engines.main(["--model-dir", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def dit(tmp_path: Path) -> Path:
    return tiny_onnx.write_stack(tmp_path / "dit", stacks.DIT)


def built(model_dir: Path) -> set[str]:
    folder = model_dir / plans.FOLDER
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def workload_of(use: str, **settings: object) -> Workload:
    return next(workload for workload in Serving(**settings).workloads(stacks.DIT) if workload.use == use)


@pytest.mark.parametrize(
    "stack, uses, precision",
    [
        ("dit", "whole prompt chunk speaker", "float16"),
        ("dit", "whole prompt chunk speaker", "bfloat16"),
        ("unet", "whole streaming speaker", "float32"),
    ],
)
def test_every_plan_of_a_stack_is_built_once(run: Run, tmp_path: Path, stack: str, uses: str, precision: str) -> None:
    model_dir = tiny_onnx.write_stack(tmp_path, stacks.named(stack))
    code, out, err = run(model_dir, "--precision", precision, *L4)
    count = len(uses.split())
    assert (code, err) == (0, "")
    for number, use in enumerate(uses.split(), 1):
        assert f"[{number}/{count}] 8.9 {use}: " in out
    assert out.count(" built in ") == out.count("not compared: no such GPU here") == count
    assert f"{count} of {count} plans exist" in out
    found = plans.survey(model_dir)
    assert len(found) == count and all(plan and plan.error is None for _, plan in found)
    before = {path: path.stat().st_mtime_ns for path, _ in found}

    code, out, _ = run(model_dir, "--precision", precision, *L4)
    assert code == 0 and out.count("exists already") == count
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_tensorrt_holds_the_profile_with_the_limits_of_serving(dit: Path) -> None:
    workload = workload_of("chunk", max_streams=3, max_hop_tokens=50)
    build = Build.of(dit / workload.onnx, workload, "8.9")
    bounds = (build.shapes.least, build.shapes.usual, build.shapes.most)
    assert [shapes["x"] for shapes in bounds] == [(2, 80, 2), (6, 80, 50), (6, 80, 106)]
    assert [shapes["att_cache"] for shapes in bounds] == [(2, 2, 2, 0, 4), (2, 6, 2, 350, 4), (2, 6, 2, 1600, 4)]
    assert [shapes["t"] for shapes in bounds] == [(2,), (6,), (6,)]


def test_mish_in_bfloat16_which_tensorrt_does_not_read_is_computed_in_float32(dit: Path) -> None:
    workload = workload_of("chunk", precision="bfloat16")
    model = onnx.load(str(dit / workload.onnx))
    next(node for node in model.graph.node if node.op_type == "Identity").op_type = "Mish"
    onnx.save(model, str(dit / workload.onnx))
    assert len(Build.of(dit / workload.onnx, workload, "8.9").plan()) > 10_000


def test_plans_for_several_gpus_are_beside_each_other_and_each_fits_its_own(run: Run, dit: Path) -> None:
    code, out, _ = run(dit, "--capability", "8.6", "12.0")
    assert code == 0 and "8 of 8 plans exist" in out and len(plans.survey(dit)) == 8
    code, out, err = run(dit, "--list", "--capability", "8.6")
    assert (code, err) == (0, "") and out.count("fits: ") == 4
    assert out.count("does not fit: compute capability: built for 12.0, here 8.6") == 4
    assert "fits: chunk, never compared with its ONNX file" in out
    for capability, version in (("7.5", editions.RTX.version), ("8.6", "tensorrt_rtx 1.0.0")):
        with pytest.raises(PlanError, match=f"built for (8.6|12.0), here {capability}|here {version}"):
            plans.find(workload_of("chunk"), dit, Machine("any", capability, version))


def test_the_real_library_refuses_damaged_plans_and_cannot_load_good_ones_without_a_driver(dit: Path) -> None:
    trt = editions.RTX.load()
    workload = workload_of("speaker")
    plan = Build.of(dit / workload.onnx, workload, "8.9").plan()
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    runtime = trt.Runtime(log_of(trt))
    assert runtime.get_engine_validity(b"x" * 100)[1] & malformed
    assert not runtime.get_engine_validity(plan)[1] & malformed
    with pytest.raises(PlanError, match="TensorRT refuses the plan of speaker: .*CUDA driver version"):
        TensorRTNetwork(plan, "speaker", "cpu")


def test_an_operator_that_tensorrt_lacks_fails_that_plan_alone(run: Run, dit: Path) -> None:
    path = dit / stacks.DIT.networks["whole"]
    model = onnx.load(str(path))
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "Bernoulli"
    del softmax.attribute[:]
    onnx.save(model, str(path))
    code, out, err = run(dit, *L4)
    assert code == 1 and "3 of 4 plans exist" in out
    assert "TensorRT cannot read" in err and "Bernoulli" in err
    assert not any("estimator.fp32.dynamic_batch" in name for name in built(dit))


def test_a_plan_that_tensorrt_cannot_build_is_an_error_with_its_own_reason(run: Run, dit: Path) -> None:
    """For Turing (7.5) tensorrt_rtx multiplies no float32 matrices."""
    (dit / "campplus.onnx").rename(dit / "kept")
    tiny_onnx.write_estimator(dit / "campplus.onnx")
    model = onnx.load(str(dit / "campplus.onnx"))
    next(node for node in model.graph.node if node.op_type == "Softmax").op_type = "Bernoulli"
    onnx.save(model, str(dit / "campplus.onnx"))
    workload = workload_of("speaker")
    with pytest.raises(BuildError, match="cannot read .*Bernoulli"):
        Build.of(dit / workload.onnx, workload, "7.5")
    (dit / "kept").rename(dit / "campplus.onnx")
    with pytest.raises(
        BuildError, match="built no plan of campplus.onnx: .*Turing.*FP32 GEMM is not supported"
    ) as caught:
        Build.of(dit / workload.onnx, workload, "7.5").plan()
    assert "Bernoulli" not in str(caught.value)


def test_an_interrupted_build_keeps_the_finished_plans(run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path) -> None:
    finished = Build.plan
    calls: list[Build] = []

    def plan(self: Build) -> bytes:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finished(self)

    monkeypatch.setattr(Build, "plan", plan)
    code, _, err = run(dit, *L4)
    assert code == 130 and "interrupted" in err and len(plans.survey(dit)) == 1
    assert run(dit, *L4)[0] == 0 and len(plans.survey(dit)) == 4


def test_an_interrupt_inside_tensorrt_ends_the_build(run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path) -> None:
    class Interrupted(tqdm):
        def update(self, n: float | None = 1) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(builder, "tqdm", Interrupted)
    code, _, err = run(dit, *L4)
    assert code == 130 and "interrupted" in err and built(dit) == set()


def test_without_a_gpu_the_target_has_to_be_named(run: Run, dit: Path) -> None:
    code, _, err = run(dit)
    assert code == 1 and "there is no GPU: name the --capability of the one that will serve" in err
    code, _, err = run(dit, "--capability", "9.0")
    assert code == 1 and "builds no plans for compute capability 9.0, only for 7.5, 8.0" in err
    assert built(dit) == set()


def test_a_file_with_a_fixed_batch_size_is_refused_with_a_remedy(run: Run, tmp_path: Path) -> None:
    unet = tiny_onnx.write_stack(tmp_path, stacks.UNET)
    for name in ("fp32", "streaming.fp32"):
        tiny_onnx.write_estimator(unet / f"flow.decoder.estimator.{name}.onnx", rows=2)
    code, out, err = run(unet, *L4)
    assert code == 1 and "2 of 3 plans exist" in out
    assert "axis 0 of input 'x' is fixed at 2, serving needs rows 2-32; remove it and export it" in err


def test_missing_and_invalid_files_are_named(run: Run, tmp_path: Path, dit: Path) -> None:
    code, _, err = run(tmp_path / "nowhere", *L4)
    assert code == 1 and "holds no ONNX file of a flow" in err and "cosyvoice-triton export onnx" in err
    (dit / "campplus.onnx").unlink()
    (dit / "flow.decoder.estimator.fp32.dynamic_batch.onnx").write_bytes(b"\xff not ONNX")
    code, out, err = run(dit, *L4)
    assert code == 1 and "2 of 4 plans exist" in out
    assert "campplus.onnx is missing" in err and "dynamic_batch.onnx is not an ONNX file" in err
    assert run(dit, "--max-streams", 0, *L4)[0] == 1


def test_without_tensorrt_the_error_names_the_missing_packages(
    run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path
) -> None:
    monkeypatch.setattr(editions, "installed", lambda: None)
    code, _, err = run(dit)
    assert code == 1 and "TensorRT is not installed" in err and not (dit / plans.FOLDER).exists()


def test_the_list_shows_which_plans_fit_and_why_others_do_not(run: Run, dit: Path) -> None:
    code, _, err = run(dit, "--list", *L4)
    command = f"cosyvoice-triton export engines --model-dir {dit}"
    assert code == 1
    assert err.count(f"there is none; build it as docs/gpu.md describes; run: {command}") == 4
    for workload in Serving().workloads(stacks.DIT):
        plans.write(dit, Key.of(workload, dit, Machine.ahead("8.9")), b"", 1.0, error=None)
    (dit / plans.FOLDER / "stray.plan").write_bytes(b"copied from somewhere")
    sidecar = next((dit / plans.FOLDER).glob("campplus*.json"))
    entry = json.loads(sidecar.read_text())
    entry["key"]["machine"] = {"gpu": "NVIDIA L20", "capability": "8.9", "tensorrt": "tensorrt 10.4.0"}
    sidecar.write_text(json.dumps(entry))
    code, out, err = run(dit, "--list", "--max-hop-tokens", 200, *L4)
    assert code == 1
    assert (
        "does not fit: GPU: built for NVIDIA L20, here any; TensorRT: built for tensorrt 10.4.0, here tensorrt_r" in out
    )
    assert "does not fit: frames: built for 2-206, serving needs 2-406" in out
    assert "its sidecar is missing or damaged" in out
    assert f"run: cosyvoice-triton export engines --model-dir {dit} --max-hop-tokens 200" in err


# --- comparing a plan with its ONNX file, on the fake -----------------------------------------------------------


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch, dit: Path) -> fake_tensorrt.State:
    """The fake, with plans of the dit stack that were never compared."""
    here = Machine("NVIDIA Test", "9.0", f"tensorrt {fake_tensorrt.__version__}")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: here))
    state = fake_tensorrt.install(monkeypatch)
    for workload in Serving("float32").workloads(stacks.DIT):
        plan = fake_tensorrt.plan(dit / workload.onnx, workload)
        plans.write(dit, Key.of(workload, dit, here), plan, 1.0, error=None)
    return state


def test_plans_built_ahead_of_time_are_compared_once_where_they_run(
    run: Run, trt: fake_tensorrt.State, dit: Path
) -> None:
    code, out, err = run(dit, "--precision", "float32", "--device", "cpu")
    assert (code, err) == (0, "") and out.count("compared: ") == out.count("0.00 % from the ONNX file") == 4
    assert all(plan is not None and plan.error is not None and plan.error < 1e-5 for _, plan in plans.survey(dit))
    code, out, _ = run(dit, "--precision", "float32", "--device", "cpu")
    assert code == 0 and out.count("exists already") == 4


@pytest.mark.parametrize("wrong_by", [10.0, float("nan")])
def test_a_plan_with_wrong_outputs_is_never_loaded(
    run: Run, trt: fake_tensorrt.State, dit: Path, wrong_by: float
) -> None:
    trt.wrong_by = wrong_by
    code, _, err = run(dit, "--precision", "float32", "--device", "cpu")
    assert code == 1 and err.count("is wrong") == 4 and "try another --precision" in err
    assert all(plan is None for _, plan in plans.survey(dit))


def test_a_plan_that_was_never_compared_is_loaded_with_a_warning(
    trt: fake_tensorrt.State, dit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TensorRTNetwork.load(workload_of("speaker"), dit, "cpu")
    assert "campplus.speaker" in caplog.text and "was never compared with its ONNX file" in caplog.text
