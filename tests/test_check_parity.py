"""The parity command: what it runs, what it calls a miss, and what it returns."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.check_parity import main
from scripts.parity.fixture import Tolerance
from scripts.parity.runner import all_checks, compare
from scripts.parity.weight_rule import generate_weights

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "assets" / "golden"


@pytest.fixture
def folder(tmp_path):
    """A folder with one small fixture, to be spoiled."""
    for suffix in (".json", ".safetensors"):
        shutil.copy(GOLDEN / f"item8a_fade_in_out{suffix}", tmp_path)
    return tmp_path


def edit_tensors(folder: Path, **changes: torch.Tensor) -> None:
    path = folder / "item8a_fade_in_out.safetensors"
    save_file(load_file(path) | {key.replace("__", "/"): value for key, value in changes.items()}, path)


def edit_json(folder: Path, **changes: object) -> None:
    path = folder / "item8a_fade_in_out.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_committed_fixture_has_a_check():
    names = {
        json.loads(path.read_text())["name"] for path in GOLDEN.glob("*.json") if not path.stem.endswith(".weights")
    }
    assert names
    assert names <= all_checks().keys()


def test_a_good_folder_passes_with_one_line_per_output(folder, capsys):
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PASS  item8a_fade_in_out out/faded  abs 0.0e+00 rel 0.0e+00")
    assert lines[-1] == "1 passed, 0 missed"


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_a_changed_result_is_a_miss(folder, capsys, value):
    faded = load_file(folder / "item8a_fade_in_out.safetensors")["out/faded"]
    faded[0, 7] += value
    edit_tensors(folder, out__faded=faded)
    assert main([str(folder)]) == 1
    assert "MISS  item8a_fade_in_out out/faded" in capsys.readouterr().out


def test_another_shape_is_a_miss(folder, capsys):
    edit_tensors(folder, out__faded=torch.zeros(1, 4999))
    assert main([str(folder)]) == 1
    assert "shape [1, 5000], expected [1, 4999]" in capsys.readouterr().out


def test_an_output_that_no_check_computes_is_a_miss(folder, capsys):
    edit_tensors(folder, out__more=torch.zeros(1))
    assert main([str(folder)]) == 1
    assert "MISS  item8a_fade_in_out out/more  not computed" in capsys.readouterr().out


def test_an_unknown_fixture_is_named_and_the_others_still_run(folder, capsys):
    for suffix in (".json", ".safetensors"):
        shutil.copy(folder / f"item8a_fade_in_out{suffix}", folder / f"item9_new{suffix}")
    meta = folder / "item9_new.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"name": "item9_new"}))
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert "MISS  item9_new  unknown fixture" in out
    assert "PASS  item8a_fade_in_out" in out


def test_a_check_that_raises_is_a_miss_with_its_message(folder, capsys):
    edit_tensors(folder, in__fade_out=torch.zeros(1, 3))
    assert main([str(folder)]) == 1
    assert "ValueError: cannot fade 3 into 5000 samples" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_half_a_fixture_is_a_miss(folder, capsys, suffix):
    (folder / f"item8a_fade_in_out{suffix}").unlink()
    assert main([str(folder)]) == 1
    assert f"MISS  item8a_fade_in_out  item8a_fade_in_out{suffix} is missing" in capsys.readouterr().out


def test_a_broken_description_is_a_miss(folder, capsys):
    (folder / "item8a_fade_in_out.json").write_text("{")
    assert main([str(folder)]) == 1
    assert "MISS  item8a_fade_in_out  unreadable" in capsys.readouterr().out


def test_the_fixtures_own_tolerance_decides(folder):
    faded = load_file(folder / "item8a_fade_in_out.safetensors")["out/faded"]
    edit_tensors(folder, out__faded=faded + 1e-3)
    edit_json(folder, tolerance={"atol": 2e-3})
    assert main([str(folder)]) == 0


def test_listings_are_compared_by_key_and_shape(folder, capsys):
    (folder / "manifests").mkdir()
    listing = json.loads((GOLDEN / "manifests" / "cosyvoice2_hift_pt.json").read_text())
    target = folder / "manifests" / "cosyvoice2_hift_pt.json"
    target.write_text(json.dumps(listing))
    assert main([str(folder)]) == 0
    assert "328 keys and shapes equal" in capsys.readouterr().out
    target.write_text(json.dumps(listing | {"conv_post.bias": [19], "stray": [1]}))
    assert main([str(folder)]) == 1
    assert "2 differences" in capsys.readouterr().out


def test_an_unknown_listing_is_a_miss(folder, capsys):
    (folder / "manifests").mkdir()
    (folder / "manifests" / "vocos.json").write_text("{}")
    assert main([str(folder)]) == 1
    assert "MISS  manifests/vocos.json  unknown listing" in capsys.readouterr().out


def test_a_folder_without_fixtures_or_no_folder_is_unusable(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no fixture" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_it_runs_as_a_file_from_any_directory(folder):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "check_parity.py", "."], cwd=folder, env=environment, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()


def test_rms_and_absolute_difference_must_both_hold():
    expected = torch.zeros(100)
    actual = torch.full((100,), 0.5)
    assert compare(expected, actual, Tolerance(0.5, 0.5))[0]
    assert not compare(expected, actual, Tolerance(0.4, 0.5))[0]
    assert not compare(expected, actual, Tolerance(0.5, 0.4))[0]


def test_integers_must_be_equal():
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 2]), Tolerance())[0]
    assert not compare(torch.tensor([1, 2]), torch.tensor([1, 3]), Tolerance())[0]


def test_generated_weights_that_differ_from_the_check_are_refused():
    with pytest.raises(ValueError, match="generated weights sum to"):
        generate_weights({"a.bias": (3,)}, {"sum_abs_float64": 1.0, "first_two_values": {}})
