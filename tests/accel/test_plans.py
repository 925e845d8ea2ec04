"""Plans on disk: names, which plan is found, and that a plan that does not fit is never loaded."""

import dataclasses
import os
from pathlib import Path

import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.runtimes import plans
from cosyvoice_triton.runtimes.plans import Key, Machine, Plan, PlanError
from cosyvoice_triton.runtimes.workloads import Serving, Span, Workload

from tests.support import tiny_onnx

H200 = Machine("NVIDIA H200", "9.0", "tensorrt 10.11.0.33")
L4 = Machine("any", "8.9", "tensorrt_rtx 1.7.1.116")
DATA = b"a plan's bytes"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_onnx.write_stack(tmp_path, stacks.DIT)


def workload_of(use: str, **settings: object) -> Workload:
    return next(workload for workload in Serving(**settings).workloads(stacks.DIT) if workload.use == use)


def write(model_dir: Path, use: str = "chunk", machine: Machine = H200, **settings: object) -> Plan:
    return plans.write(model_dir, Key.of(workload_of(use, **settings), model_dir, machine), DATA, 12.34, error=0.01)


def test_the_file_name_has_everything_that_a_plan_depends_on(model_dir: Path) -> None:
    plan = write(model_dir)
    sha = plans.sha256_of(model_dir / workload_of("chunk").onnx)
    assert plan.path == model_dir / "tensorrt" / (
        "flow.decoder.estimator.chunk.fp32.dynamic_batch.simplify.chunk.rows2-32.frames2-206.cached0-1600.float16."
        f"nvidia-h200.sm90.tensorrt10.11.0.33.{sha[:12]}.plan"
    )
    names = {plan.path.name}
    for machine in (
        dataclasses.replace(H200, gpu="NVIDIA H100"),
        dataclasses.replace(H200, capability="10.0"),
        dataclasses.replace(H200, tensorrt="tensorrt 11.4.0.106"),
    ):
        names.add(write(model_dir, machine=machine).path.name)
    names.add(write(model_dir, precision="bfloat16").path.name)
    names.add(write(model_dir, max_hop_tokens=50).path.name)
    tiny_onnx.write_estimator(model_dir / workload_of("chunk").onnx)
    names.add(write(model_dir).path.name)
    assert len(names) == 7


def test_a_written_plan_is_found_and_read_back(model_dir: Path) -> None:
    plan = write(model_dir)
    found = plans.find(workload_of("chunk"), model_dir, H200)
    assert found == plan and found.read() == DATA and found.built_seconds == 12.3
    assert os.stat(plan.path).st_mode & 0o777 == 0o644
    assert sorted(path.name for path in plan.path.parent.iterdir()) == [plan.path.name, plan.path.name + ".json"]


def test_a_plan_for_larger_shapes_fits_and_the_smallest_is_chosen(model_dir: Path) -> None:
    write(model_dir, max_hop_tokens=200)
    assert plans.find(workload_of("chunk", max_streams=2), model_dir, H200).key.profile["frames"].most == 406
    tight = write(model_dir)
    assert plans.find(workload_of("chunk", max_streams=2), model_dir, H200) == tight


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gpu": "NVIDIA L20"}, "GPU: built for NVIDIA H200, here NVIDIA L20"),
        ({"capability": "8.9"}, "compute capability: built for 9.0, here 8.9"),
        ({"tensorrt": "tensorrt 10.12.0"}, "TensorRT: built for tensorrt 10.11.0.33, here tensorrt 10.12.0"),
        ({"tensorrt": L4.tensorrt}, "TensorRT: built for tensorrt 10.11.0.33, here tensorrt_rtx 1.7.1.116"),
        ({"gpu": "none", "tensorrt": "none"}, "here none; TensorRT: built for tensorrt 10.11.0.33, here none"),
    ],
)
def test_a_plan_of_another_machine_is_named_with_the_difference(
    model_dir: Path, change: dict[str, str], message: str
) -> None:
    write(model_dir)
    with pytest.raises(PlanError, match=f"does not fit: .*{message}.*") as caught:
        plans.find(workload_of("chunk"), model_dir, dataclasses.replace(H200, **change))
    assert str(caught.value).endswith("; build it as docs/gpu.md describes")


def test_other_limits_precisions_and_networks_are_named_too(model_dir: Path) -> None:
    plan = write(model_dir)
    with pytest.raises(
        PlanError,
        match="frames: built for 2-206, serving needs 2-406; build it .*, with --max-hop-tokens 200$",
    ):
        plans.find(workload_of("chunk", max_hop_tokens=200), model_dir, H200)
    with pytest.raises(
        PlanError, match="precision: built for float16, wanted float32; build it .*, with --precision float32$"
    ):
        plans.find(workload_of("chunk", precision="float32"), model_dir, H200)
    with pytest.raises(PlanError, match=r"\(whole\): there is none; build it as docs"):
        plans.find(workload_of("whole"), model_dir, H200)
    sha = plan.key.onnx_sha256[:12]
    tiny_onnx.write_estimator(model_dir / workload_of("chunk").onnx)
    with pytest.raises(PlanError, match=f"ONNX file: built for .* {sha}, here "):
        plans.find(workload_of("chunk"), model_dir, H200)
    (model_dir / workload_of("chunk").onnx).unlink()
    with pytest.raises(PlanError, match="is missing; export it as docs/gpu.md describes"):
        plans.find(workload_of("chunk"), model_dir, H200)


def test_a_plan_of_the_portable_edition_fits_every_gpu_of_its_compute_capability_and_version(model_dir: Path) -> None:
    plan = write(model_dir, machine=L4)
    assert ".any.sm89.tensorrt_rtx1.7.1.116." in plan.path.name
    assert plans.find(workload_of("chunk"), model_dir, L4) == plan
    with pytest.raises(PlanError, match="compute capability: built for 8.9, here 8.6"):
        plans.find(workload_of("chunk"), model_dir, dataclasses.replace(L4, capability="8.6"))


@pytest.mark.parametrize("sidecar", [None, "", "[]", "{}", '{"key": {"gpu": "NVIDIA H200"}}'])
def test_a_plan_without_a_sidecar_is_never_found_and_a_damaged_one_not_read(
    model_dir: Path, sidecar: str | None
) -> None:
    plan = write(model_dir)
    plan.path.write_bytes(DATA[:-1])
    with pytest.raises(PlanError, match="is damaged"):
        plans.find(workload_of("chunk"), model_dir, H200).read()
    path = plan.path.with_name(plan.path.name + ".json")
    plan.withdraw() if sidecar is None else path.write_text(sidecar)
    assert plans.survey(model_dir) == [(plan.path, None)]
    with pytest.raises(PlanError, match="there is none"):
        plans.find(workload_of("chunk"), model_dir, H200)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_write_that_fails_leaves_nothing_that_can_be_loaded(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Of the plan or of its sidecar."""
    synced = []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) == failing:
            raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(model_dir)
    assert list((model_dir / plans.FOLDER).iterdir()) == []


def test_settings_are_checked_and_become_command_line_options() -> None:
    assert workload_of("chunk").options == ""
    assert workload_of("chunk", precision="bfloat16", max_streams=8).options == "--precision bfloat16 --max-streams 8"
    assert workload_of("speaker", precision="bfloat16").precision == "float32"
    assert workload_of("chunk", max_streams=1).profile["rows"] == Span(2, 2, 2)
    with pytest.raises(ValueError, match="max_hop_tokens must be at least 1, not 0"):
        Serving(max_hop_tokens=0)
    with pytest.raises(ValueError, match="not 'int8'"):
        Serving(precision="int8")


def test_an_onnx_file_with_other_inputs_or_fixed_sizes_is_refused() -> None:
    speaker = workload_of("speaker")
    assert speaker.limits({"input": (-1, -1, 80)}).most == {"input": (1, 3000, 80)}
    assert speaker.limits({"input": (1, -1, 80)}).least == {"input": (1, 48, 80)}
    with pytest.raises(ValueError, match="axis 1 of input 'input' is fixed at 200, serving needs frames 48-3000"):
        speaker.limits({"input": (1, 200, 80)})
    with pytest.raises(ValueError, match="axis 2 of input 'input' varies"):
        speaker.limits({"input": (1, -1, -1)})
    with pytest.raises(ValueError, match="has the inputs feats, not input"):
        speaker.limits({"feats": (1, -1, 80)})
