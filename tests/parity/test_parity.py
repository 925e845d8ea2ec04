"""Every fixture is computed within its tolerance; python -m tests.parity: what counts as a miss, and its exit code."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cosyvoice_triton.checkpoint import shapes_of
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig, DiTFlowConfig, UNetFlowConfig
from cosyvoice_triton.networks.hift import HiFTConfig, fuse_weight_norm
from cosyvoice_triton.token2wav.flow.encoder_window import WindowEncoder
from safetensors.torch import load_file, save_file

from tests.parity.__main__ import main
from tests.parity.fixture import Fixture
from tests.parity.runner import all_checks, run_fixture, run_manifests

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
FIXTURES = sorted(path for path in GOLDEN.parent.glob("golden*/*.json") if not path.stem.endswith(".weights"))
FADE = "item8a_fade_in_out"  # a small fixture
FULL_SIZE = {path for path in FIXTURES if path.stem.startswith("fullsize")}


@pytest.fixture
def folder(tmp_path):
    """A folder with one small fixture, which tests damage."""
    for suffix in (".json", ".safetensors"):
        shutil.copy(GOLDEN / f"{FADE}{suffix}", tmp_path)
    return tmp_path


def edit_tensors(folder: Path, **changes: torch.Tensor) -> None:
    path = folder / f"{FADE}.safetensors"
    save_file(load_file(path) | {key.replace("__", "/"): value for key, value in changes.items()}, path)


def edit_json(folder: Path, **changes: object) -> None:
    path = folder / f"{FADE}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path in FULL_SIZE else ()) for path in FIXTURES]
)
def test_every_stored_output_is_computed_within_its_tolerance(path):
    results = list(run_fixture(Fixture(path), all_checks()[path.stem]))
    assert results
    assert not [f"{result.name}: {result.detail}" for result in results if result.verdict != "PASS"]


@pytest.mark.gpu
@pytest.mark.parametrize("folder", ["golden", "golden_cosyvoice3"])
def test_a_gpu_computes_every_output_within_its_tolerance(folder):
    assert main([str(GOLDEN.with_name(folder)), "--device", "cuda"]) == 0


@pytest.mark.parametrize("name", ["item4_cosyvoice2_flow_inference", "item6d_stepaudio2_flow_streaming"])
def test_the_served_engine_is_what_is_compared(name, monkeypatch):
    """What serving computes, and networks alone do not, makes the fixture fail when it is wrong."""
    encode = WindowEncoder.encode
    monkeypatch.setattr(WindowEncoder, "encode", lambda self, windows, **kwargs: encode(self, windows, **kwargs) + 1e-3)
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), all_checks()[name]))
    of_engine = [result for result in results if "[engine" in result.detail]
    assert len(of_engine) > 9 and {result.verdict for result in of_engine} == {"MISS"}
    assert {result.verdict for result in results if result not in of_engine} == {"PASS"}


@pytest.mark.parametrize(
    ("listing", "config"),
    [
        ("golden/manifests/cosyvoice2_flow_pt.json", UNetFlowConfig),
        ("golden/manifests/stepaudio2_token2wav_flow_pt.instantiated.json", DiTFlowConfig),
        ("golden/manifests/cosyvoice2_hift_pt.json", HiFTConfig),
        ("golden_cosyvoice3/manifests/cosyvoice3_flow_pt.instantiated.json", CosyVoice3FlowConfig),
        ("golden_cosyvoice3/manifests/cosyvoice3_hift_pt.instantiated.json", HiFTConfig),
    ],
)
def test_default_sizes_are_those_of_the_official_checkpoint(listing, config):
    path = GOLDEN.parent / listing
    (verdict,) = (each.verdict for each in run_manifests(path.parent) if each.name.endswith(path.name))
    listed = {key: torch.empty(shape, device="meta") for key, shape in json.loads(path.read_text()).items()}
    sizes = shapes_of(fuse_weight_norm(listed) if config is HiFTConfig else listed)
    assert verdict == "PASS" and config.from_shapes(sizes) == config()


@pytest.mark.parametrize(("value", "code", "verdict"), [(0.0, 0, "PASS"), (1e-3, 1, "MISS"), (float("nan"), 1, "MISS")])
def test_a_line_for_each_output_says_whether_its_result_is_the_stored_one(folder, capsys, value, code, verdict):
    faded = load_file(folder / f"{FADE}.safetensors")["out/faded"]
    faded[0, 7] += value
    edit_tensors(folder, out__faded=faded)
    assert main([str(folder)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{verdict}  {FADE} out/faded  abs {value:.1e} rel ")
    assert lines[1] == f"{1 - code} passed, {code} missed"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda at: edit_tensors(at, out__faded=torch.zeros(1, 4999)), "shape [1, 5000], expected [1, 4999]"),
        (lambda at: edit_tensors(at, out__more=torch.zeros(1)), f"MISS  {FADE} out/more  not computed"),
        (lambda at: edit_tensors(at, in__fade_out=torch.zeros(1, 3)), "RuntimeError: The size of tensor a (3) must"),
        (lambda at: edit_json(at, tolerance="none"), "no tolerance is given for out/faded"),
        (lambda at: (at / f"{FADE}.json").unlink(), f"MISS  {FADE}  {FADE}.json is missing"),
        (lambda at: (at / f"{FADE}.safetensors").unlink(), f"{FADE}.safetensors is missing"),
    ],
)
def test_whatever_cannot_be_compared_is_a_miss_with_its_reason(folder, capsys, damage, line):
    damage(folder)
    assert main([str(folder)]) == 1
    assert line in capsys.readouterr().out


def test_a_folder_without_fixtures_or_no_folder_is_unusable(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no fixture" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
