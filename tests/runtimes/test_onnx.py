"""ONNX files of the estimators: compared with torch, in the engine, and with upstream's frame order. TensorRT plans:
built by the real TensorRT for RTX, and run by a fake that computes their ONNX networks; in half precision these keep
everything but the flow time, and masks make no infinities."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import MEL_BINS, SPEAKER_DIM
from cosyvoice_triton.export import engines, precision
from cosyvoice_triton.export import onnx as export_onnx
from cosyvoice_triton.networks.flow.checkpoint import load_dit_flow
from cosyvoice_triton.runtimes import onnx as onnx_runtime
from cosyvoice_triton.runtimes import tensorrt
from cosyvoice_triton.runtimes.loading import DiTOnRuntime, flow_runtime
from cosyvoice_triton.runtimes.network import Network, check_shapes
from cosyvoice_triton.runtimes.onnx import OnnxNetwork
from cosyvoice_triton.runtimes.signatures import CHUNK, Workload, signature_of, workloads
from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork, log_of, plan_file, read_plan, write_plan
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.support import fake_tensorrt, streams, tiny_onnx

pytestmark = pytest.mark.slow  # nearly all tests need the exported networks

DIRECTORIES = {stack.name: stack.checkpoint for stack in stacks.BUILT_IN if stack.networks}
UNET, UNET_STREAMING = (signature_of(stacks.UNET, use) for use in ("whole", "streaming"))
SIGNATURES = {"unet": (UNET, UNET_STREAMING), "dit": tuple(signature_of(stacks.DIT, use) for use in ("whole", "chunk"))}
STACKS = tuple(DIRECTORIES)
FLOAT32 = Precision(torch.float32, torch.float32)
HOPS = [15, 25, 40]


@pytest.fixture(scope="module")
def exported(demo_models, tmp_path_factory) -> dict[str, Path]:
    """Model directories of the demo checkpoint with exported networks, which the exporter checks."""
    directories = {}
    for stack, name in DIRECTORIES.items():
        directories[stack] = tmp_path_factory.mktemp(stack) / "checkpoint"
        shutil.copytree(demo_models / name, directories[stack])
        assert export_onnx.main(["--model-dir", str(directories[stack])]) == 0
    return directories


def engine(stack: str, directory: Path, runtime: str, kept: str = "auto") -> Token2Wav:
    limits = BatchLimits(max_streams=4)
    options = dict(device="cpu", limits=limits, precision=FLOAT32, runtime=runtime, steps=3, kv_cache_dtype=kept)
    return Token2Wav.load(stacks.named(stack), directory, **options)


def voice(seed: int, length: int) -> Prompt:
    rng = np.random.default_rng(seed)
    mel = rng.normal(size=(2 * length, MEL_BINS)).astype(np.float32)
    return Prompt(rng.integers(0, 6561, length), mel, rng.normal(size=SPEAKER_DIM).astype(np.float32), text="")


def synthesize_together(subject: Token2Wav) -> list[np.ndarray]:
    """Audio of three streams with different voices and lengths, rendered in common batches. One has no prompt."""
    tokens = [np.random.default_rng(9 + seed).integers(0, 6561, sum(HOPS) + 4 + seed) for seed in range(3)]
    voices = [voice(seed, length) for seed, length in enumerate((20, 0, 34))]
    chunks = [streams.pieces(subject, of, HOPS) for of in tokens]
    plans = [streams.Plan(*each) for each in zip(voices, chunks, strict=True)]
    return streams.together(subject, plans)


@pytest.mark.parametrize("stack", STACKS)
def test_files_have_the_names_inputs_and_outputs_of_upstream(exported, stack):
    for signature in SIGNATURES[stack]:
        session = onnxruntime.InferenceSession(exported[stack] / signature.file)
        assert tuple(entry.name for entry in session.get_inputs()) == signature.inputs
        assert tuple(entry.name for entry in session.get_outputs()) == signature.outputs
        free = [size for entry in session.get_inputs() for size in entry.shape if isinstance(size, str)]
        assert set(free) == ({"rows", "frames", "cached"} if signature.axes is CHUNK else {"rows", "frames"})


@pytest.mark.parametrize(("stack", "kept"), [*((stack, "auto") for stack in STACKS), ("dit", "int8")])
def test_streams_are_equal_on_torch_and_onnxruntime(exported, stack, kept):
    on_torch, on_onnx = (engine(stack, exported[stack], runtime, kept) for runtime in ("torch", "onnxruntime"))
    for ours, theirs in zip(synthesize_together(on_torch), synthesize_together(on_onnx), strict=True):
        assert np.abs(ours).max() > 0.01
        # In 8 bits, a value between two integers is rounded either way.
        np.testing.assert_allclose(theirs, ours, atol=1e-3 if kept == "auto" else 1e-2)
    tokens = np.random.default_rng(1).integers(0, 6561, 60)
    ours, theirs = (subject.whole(voice(3, 30), tokens) for subject in (on_torch, on_onnx))
    np.testing.assert_allclose(theirs, ours, atol=1e-3)


class Changed(Network):
    """A network whose outputs a test changes. rows: of a profile for so many."""

    def __init__(self, network: Network, change=lambda outputs, known: outputs, rows: int | None = None) -> None:
        self._network, self._change = network, change
        self.limits = dict(network.limits)
        for name, (least, usual, most) in self.limits.items() if rows else ():
            axis = 1 if "cache" in name else 0
            self.limits[name] = least, usual, (*most[:axis], rows, *most[axis + 1 :])

    def run(self, inputs):
        check_shapes(self.limits, inputs)
        outputs = self._network.run(inputs)
        return outputs | self._change(outputs, inputs["att_cache"].shape[3] if "att_cache" in inputs else 0)


@pytest.mark.parametrize("stack", STACKS)
def test_batches_larger_than_a_profile_run_in_pieces(exported, stack, monkeypatch):
    whole = synthesize_together(engine(stack, exported[stack], "onnxruntime"))
    monkeypatch.setattr(onnx_runtime, "OnnxNetwork", lambda path, original=OnnxNetwork: Changed(original(path), rows=2))
    in_pieces = synthesize_together(engine(stack, exported[stack], "onnxruntime"))
    for pieces, together in zip(in_pieces, whole, strict=True):
        np.testing.assert_allclose(pieces, together, atol=1e-3)


def newest_first(outputs: dict[str, Tensor], known: int) -> dict[str, Tensor]:
    """Upstream's order of frames: new ones before the cached ones."""
    return {"new_att_cache": outputs["new_att_cache"].roll(-known, dims=3)}


def without_cache(outputs: dict[str, Tensor], known: int) -> dict[str, Tensor]:
    return {"new_att_cache": torch.zeros_like(outputs["new_att_cache"])}


def dit_on(directory: Path, *change) -> DiTOnRuntime:
    config = load_dit_flow(directory / "flow.pt").config.estimator
    whole, chunk = (OnnxNetwork(directory / signature.file) for signature in SIGNATURES["dit"])
    chunk = Changed(chunk, *change)
    return DiTOnRuntime(config, whole, chunk, chunk, torch.device("cpu"), torch.float32)


def test_a_file_that_puts_the_newest_frames_first_gives_the_same_cache_and_one_that_drops_it_is_refused(exported):
    results = []
    for change in ((), (newest_first,)):
        estimator = dit_on(exported["dit"], *change)
        torch.manual_seed(0)
        cache = estimator.empty_cache(1, 2)[0]
        for frames in (12, 20):
            x, mu, none = torch.randn(3, 2, MEL_BINS, frames)
            cache = cache.with_room(frames)
            velocity = estimator.forward_chunk(x, torch.tensor([0.3, 0.3]), mu, mu[..., 0], none, cache)
        results.append((velocity, cache.attention.keys, cache.attention.values, cache.conv))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours)
    with pytest.raises(ValueError, match="new_att_cache does not hold the frames of its att_cache"):
        dit_on(exported["dit"], without_cache)


def test_a_file_with_other_weights_fails_the_check_and_is_kept(exported, tmp_path, capsys):
    directory = shutil.copytree(exported["unet"], tmp_path / "unet")
    state = torch.load(directory / "flow.pt", weights_only=True)
    state["decoder.estimator.final_proj.weight"] *= 1.01
    torch.save(state, directory / "flow.pt")
    assert export_onnx.main(["--model-dir", str(directory)]) == 1
    assert "FAILED: 2 rows, 4 frames" in capsys.readouterr().out
    assert (directory / UNET.file).exists() and (directory / UNET_STREAMING.file).exists()


def test_a_missing_file_is_named_with_the_page_about_the_export_and_one_that_is_no_network(demo_models, tmp_path):
    with pytest.raises(ValueError, match=r"flow\.decoder.*is missing; export it as docs/gpu.md describes"):
        engine("unet", demo_models / DIRECTORIES["unet"], "onnxruntime")
    (tmp_path / "x.onnx").write_bytes(b"not a network")
    with pytest.raises(ValueError, match=r"x\.onnx: onnxruntime cannot load it"):
        OnnxNetwork(tmp_path / "x.onnx")


@pytest.mark.parametrize(
    "setting, device, message",
    [
        ("cuda_graph", "cpu", "needs a GPU; this instance is on cpu"),
        ("tensorrt", "cpu", "needs a GPU"),
        ("onnxruntime", "cuda:0", "computes on the CPU; this instance is on cuda:0: set auto"),
    ],
)
def test_runtimes_are_refused_on_another_kind_of_device(setting, device, message):
    with pytest.raises(ValueError, match=f"flow_runtime '{setting}' {message}"):
        flow_runtime(setting, device)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (2, 80, 3)}, r"input 'x' has shape \(2, 80, 3\): the network takes \(2, 80, 4\) to \(8, 80, 9\)"),
        ({"x": (2, 80)}, r"input 'x' has shape \(2, 80\)"),
        ({}, r"expected x \('x'\)"),
        ({"x": (2, 80, 4), "y": (1,)}, r"inputs x, y: expected x \('y'\)"),
    ],
)
def test_a_shape_outside_the_limits_names_input_shape_and_limits(shapes, message):
    limits = {"x": ((2, 80, 4), (4, 80, 6), (8, 80, 9))}
    with pytest.raises(ValueError, match=message):
        check_shapes(limits, {name: torch.zeros(shape) for name, shape in shapes.items()})
    check_shapes(limits, {"x": torch.zeros(8, 80, 4)})


def test_the_real_tensorrt_builds_the_plan_of_an_exported_estimator(exported):
    """The one with caches; it cannot be run here. The small networks of test_tensorrt have the others' inputs."""
    workload = next(each for each in workloads(stacks.DIT, "float16") if each.use == "chunk")
    path = exported["dit"] / workload.onnx
    assert len(engines.build(path, workload, "8.9")) > path.stat().st_size / 2  # half precision


WHOLE, PROMPT, PIECE, SPEAKER = range(4)


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
        assert len(read_plan(plan_file(workload, model_dir, tensorrt.target("8.6")))) > 1000
        with pytest.raises(RuntimeError, match=r"\.plan does not exist; build it as docs/gpu.md describes"):
            read_plan(plan_file(workload, model_dir, tensorrt.target("8.9")))


def test_a_plan_is_built_again_for_another_onnx_file_which_replaces_it(dit: Path) -> None:
    plan = plan_file(of(PIECE), dit, "machine")
    write_plan(plan, b"plan")
    assert read_plan(plan_file(of(PIECE), dit, "machine")) == b"plan"
    tiny_onnx.write_estimator(dit / of(PIECE).onnx)
    other = plan_file(of(PIECE), dit, "machine")
    with pytest.raises(RuntimeError, match=f"{other} does not exist, and {plan.name} was built from another ONNX file"):
        read_plan(other)
    write_plan(other, b"other")
    assert [*plan.parent.iterdir()] == [other] and read_plan(other) == b"other"


def test_the_real_library_refuses_damaged_plans_and_cannot_load_good_ones_without_a_driver(dit: Path) -> None:
    trt = tensorrt.tensorrt()
    plan = engines.build(dit / of(SPEAKER).onnx, of(SPEAKER), "8.9")
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    runtime = trt.Runtime(log_of(trt))
    assert runtime.get_engine_validity(b"x" * 100)[1] & malformed
    assert not runtime.get_engine_validity(plan)[1] & malformed
    with pytest.raises(RuntimeError, match="TensorRT refuses the plan of speaker: .*CUDA driver version"):
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
        assert engines.build_missing(dit, of(PIECE), "cpu", "").startswith("built chunk-float32-here-")
        assert TensorRTNetwork.load(of(PIECE), dit, "cpu").run(chunk_inputs(2, 4, 0))
    else:
        with pytest.raises(RuntimeError, match="is wrong: output is .* away from the ONNX file, 5 % is the limit; try"):
            engines.build_missing(dit, of(PIECE), "cpu", "")
        assert not (dit / tensorrt.FOLDER).exists()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny_onnx.write_estimator(tmp_path / "estimator.onnx")
    return tmp_path / "estimator.onnx"


def test_half_precision_equals_float32_up_to_rounding(path: Path) -> None:
    rng = np.random.default_rng(30)
    x, mu, cond = rng.standard_normal((3, 2, 80, 30), np.float32)
    mask = np.array([1, 0], np.float32)[:, None, None].repeat(30, axis=2)  # the second row is all padding
    t, spks = np.array([0.1, 0.9], np.float32), rng.standard_normal((2, 80), np.float32)
    values = {"x": x, "mask": mask, "mu": mu, "t": t, "spks": spks, "cond": cond}
    halves = {name: value if name == precision.TIME else value.astype(np.float16) for name, value in values.items()}
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, values)
    model = precision.read(path, "float16")
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    (found,) = onnxruntime.InferenceSession(model).run(None, halves)
    assert found.dtype == np.float16 and np.isfinite(found).all()
    wrong = (found.astype(np.float32) - expected)[0]
    assert np.sqrt(np.mean(wrong**2) / np.mean(expected[0] ** 2)) < 1e-3


def test_float32_returns_the_file_unchanged_and_files_of_other_formats_are_refused(path: Path, tmp_path: Path) -> None:
    assert onnx.load_from_string(precision.read(path, "float32")) == onnx.load(str(path))
    (tmp_path / "not.onnx").write_bytes(b"\xff")
    for name in ("not.onnx", "missing.onnx"):
        with pytest.raises(ValueError, match=f"{name} is not an ONNX file"):
            precision.read(tmp_path / name, "float16")
