"""ONNX networks in half precision: everything except the flow time, and no infinities from masks."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from cosyvoice_triton.export import precision

from tests.support import tiny_onnx


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
