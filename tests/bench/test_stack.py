"""The benchmark of a whole stack."""

import argparse
import json
from pathlib import Path

import pytest
from cosyvoice_triton.bench.stack import BenchPlan, main, peak


def test_the_peak_is_the_largest_sum_over_all_gpus() -> None:
    samples = "0, 100\n1, 50\n0, 120\n1, 70\n0, 90\n1, 80\n0, 9"
    assert peak(samples) == 190
    assert peak("1, 50\n3, 7\n1, 60\n3, 4\n") == 64  # of the GPUs that are visible
    assert peak("") is None


@pytest.mark.parametrize(
    ("text", "settings"), [("7.5:4", {"gpu_memory_gib": "7.5", "max_streams": "4"}), (":2", {"max_streams": "2"})]
)
def test_a_plan_is_memory_and_streams(text: str, settings: dict[str, str]) -> None:
    assert BenchPlan.read(text).settings == settings


@pytest.mark.parametrize("text", ["7.5", "7.5:", ":0", "7.5:four"])
def test_another_plan_is_refused_by_its_value(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text)):
        BenchPlan.read(text)


def test_a_plan_that_cannot_be_rendered_ends_with_the_reason(tmp_path, capsys) -> None:
    given = [str(tmp_path), "--plans", ":2", "--device", "cpu", "--set", "streams=2"]
    assert main([*given, "--output", str(tmp_path / "plans")]) == 1
    assert "streams" in capsys.readouterr().err


@pytest.mark.server
def test_a_server_is_measured(demo_models: Path, tmp_path: Path, capsys) -> None:
    """With one listener: several begin seconds apart and wait until their audio has been played."""
    given = [str(demo_models), "--plans", ":2", "--device", "cpu", "--listeners", "1", "--requests", "1"]
    given += ["--set", "flow_precision=float32"]  # the choice of another one takes seconds
    assert main([*given, "--output", str(tmp_path / "dit")]) == 0
    (row,) = json.loads((tmp_path / "dit.json").read_text())
    assert (row["listeners"], row["requests"], row["errors"]) == (1, 1, 0)
    assert row["first_chunk_ms"]["p50"] > 0 and row["share_without_gap"] is not None
    assert "dit :2, 1 listener(s): first chunk p50 " in capsys.readouterr().out
