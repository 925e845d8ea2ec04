"""tools.export.engines with small ONNX networks and the fake TensorRT, which computes them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from common import stacks
from common.accel import plans
from common.accel.plans import Machine
from tests.support import fake_tensorrt, tiny_onnx
from tools.export import builder
from tools.export import engines as build_engines

HERE = Machine("NVIDIA Test", "9.0", fake_tensorrt.__version__)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> fake_tensorrt.State:
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: HERE))
    return fake_tensorrt.install(monkeypatch)


@pytest.fixture
def run(trt: fake_tensorrt.State, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the tool on the CPU; returns its exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = build_engines.main(["--model-dir", *map(str, arguments), "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def dit(tmp_path: Path) -> Path:
    return tiny_onnx.write_stack(tmp_path / "dit", stacks.DIT)


def built(model_dir: Path) -> set[str]:
    return {path.name for path in (model_dir / plans.FOLDER).iterdir()}


@pytest.mark.parametrize("stack, uses", [("dit", "whole prompt chunk speaker"), ("unet", "whole streaming speaker")])
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_every_plan_of_a_stack_is_built_once(
    run: Run, trt: fake_tensorrt.State, tmp_path: Path, stack: str, uses: str, precision: str
) -> None:
    model_dir = tiny_onnx.write_stack(tmp_path, stacks.named(stack))
    code, out, err = run(model_dir, "--precision", precision)
    count = len(uses.split())
    assert (code, err) == (0, "")
    for number, use in enumerate(uses.split(), 1):
        assert f"[{number}/{count}] {use}: " in out
    assert out.count(" built in ") == count and f"{count} of {count} plans exist" in out
    assert all(plan is not None for _, plan in plans.survey(model_dir)) and len(plans.survey(model_dir)) == count

    code, out, _ = run(model_dir, "--precision", precision)
    assert code == 0 and out.count("exists already") == count and len(trt.built) == count


def test_profiles_have_the_limits_of_serving(run: Run, trt: fake_tensorrt.State, dit: Path) -> None:
    code, _, _ = run(dit, "--max-streams", 3, "--max-hop-tokens", 50)
    assert code == 0
    chunk = trt.built[2]["profile"]
    assert chunk["x"] == [(2, 80, 2), (6, 80, 50), (6, 80, 106)]
    assert chunk["att_cache"] == [(2, 2, 2, 0, 4), (2, 6, 2, 350, 4), (2, 6, 2, 1600, 4)]
    assert chunk["t"] == [(2,), (6,), (6,)]


def test_the_timing_cache_of_one_build_is_used_by_the_next(run: Run, trt: fake_tensorrt.State, dit: Path) -> None:
    assert run(dit)[0] == 0
    assert [plan["cache"] for plan in trt.built] == [b""] + [b"timings of NVIDIA Test 9.0"] * 3
    (timings,) = (dit / plans.FOLDER).glob("*.timings")
    timings.write_bytes(b"of another driver")
    assert run(dit, "--precision", "float32")[0] == 0
    assert trt.built[4]["cache"] == b""


def test_a_failed_build_leaves_no_file_and_does_not_stop_the_others(
    run: Run, trt: fake_tensorrt.State, dit: Path
) -> None:
    trt.unsupported = {"Softmax"}
    code, out, err = run(dit)
    assert code == 1 and "3 of 4 plans exist" in out
    assert "no importer for operator Softmax" in err
    assert not any("estimator.fp32.dynamic_batch" in name for name in built(dit))


def test_a_builder_that_returns_none_is_an_error_with_the_logged_reason(
    run: Run, trt: fake_tensorrt.State, dit: Path
) -> None:
    trt.build_fails = "could not find any implementation for node softmax"
    code, _, err = run(dit)
    assert code == 1 and err.count("built no plan") == 4 and "any implementation for node softmax" in err
    assert built(dit) == set()


@pytest.mark.parametrize("wrong_by", [10.0, float("nan")])
def test_a_plan_with_wrong_outputs_is_not_kept(run: Run, trt: fake_tensorrt.State, dit: Path, wrong_by: float) -> None:
    trt.wrong_by = wrong_by
    code, _, err = run(dit)
    assert code == 1 and err.count("is wrong") == 4 and "try another --precision" in err
    assert not any(name.endswith((".plan", ".json")) for name in built(dit))


def test_an_interrupted_build_keeps_the_finished_plans(run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path) -> None:
    finished = build_engines.build
    calls: list[Path] = []

    def build(onnx: Path, *rest: object) -> bytes:
        calls.append(onnx)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finished(onnx, *rest)

    monkeypatch.setattr(build_engines, "build", build)
    code, _, err = run(dit)
    assert code == 130 and "interrupted" in err and len(plans.survey(dit)) == 1
    assert run(dit)[0] == 0


def test_an_interrupt_inside_tensorrt_ends_the_build(run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path) -> None:
    class Interrupted(tqdm):
        def update(self, n: float | None = 1) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(builder, "tqdm", Interrupted)
    code, _, err = run(dit)
    assert code == 130 and "interrupted" in err and built(dit) == set()


def test_without_a_gpu_nothing_is_built(run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path) -> None:
    nothing = Machine("none", "none", HERE.tensorrt)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: nothing))
    code, _, err = run(dit)
    assert code == 1 and "there is no GPU" in err


def test_a_file_with_a_fixed_batch_size_is_refused_with_a_remedy(run: Run, tmp_path: Path) -> None:
    unet = tiny_onnx.write_stack(tmp_path, stacks.UNET)
    for name in ("fp32", "streaming.fp32"):
        tiny_onnx.write_estimator(unet / f"flow.decoder.estimator.{name}.onnx", rows=2)
    code, out, err = run(unet)
    assert code == 1 and "2 of 3 plans exist" in out
    assert "axis 0 of input 'x' is fixed at 2, serving needs rows 2-32; remove it and export it" in err


def test_missing_and_invalid_files_are_named(run: Run, tmp_path: Path, dit: Path) -> None:
    code, _, err = run(tmp_path / "nowhere")
    assert code == 1 and "holds no ONNX file of a flow" in err and "tools.export.onnx" in err
    (dit / "campplus.onnx").unlink()
    (dit / "flow.decoder.estimator.fp32.dynamic_batch.onnx").write_bytes(b"\xff not ONNX")
    code, out, err = run(dit)
    assert code == 1 and "2 of 4 plans exist" in out
    assert "campplus.onnx is missing" in err and "dynamic_batch.onnx is not an ONNX file" in err
    assert run(dit, "--max-streams", 0)[0] == 1


def test_without_tensorrt_the_error_names_the_missing_package(dit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_engines.main(["--model-dir", str(dit)]) == 1
    assert "TensorRT is not installed" in capsys.readouterr().err
    assert not (dit / plans.FOLDER).exists()


def test_the_list_shows_which_plans_fit_and_why_others_do_not(
    run: Run, monkeypatch: pytest.MonkeyPatch, dit: Path
) -> None:
    code, _, err = run(dit, "--list")
    command = f"python -m tools.export.engines --model-dir {dit}"
    assert code == 1
    assert err.count(f"there is none; build it as docs/tensorrt.md describes; run: {command}") == 4
    run(dit)
    code, out, err = run(dit, "--list")
    assert (code, err) == (0, "") and out.count("fits this machine") == 4
    assert "fits this machine: prompt" in out and "fits this machine: chunk" in out

    (dit / plans.FOLDER / "stray.plan").write_bytes(b"copied from somewhere")
    sidecar = next((dit / plans.FOLDER).glob("campplus*.json"))
    entry = json.loads(sidecar.read_text())
    entry["key"]["machine"] = {"gpu": "NVIDIA L20", "capability": "8.9", "tensorrt": "10.4.0"}
    sidecar.write_text(json.dumps(entry))
    code, out, err = run(dit, "--list", "--max-hop-tokens", 200)
    assert code == 1
    assert "does not fit: GPU: built for NVIDIA L20, here NVIDIA Test; compute capability: built for 8.9" in out
    assert "TensorRT: built for 10.4.0, here 10.11.0.33" in out
    assert "does not fit: frames: built for 2-206, serving needs 2-406" in out
    assert "its sidecar is missing or damaged" in out
    assert f"run: python -m tools.export.engines --model-dir {dit} --max-hop-tokens 200" in err
