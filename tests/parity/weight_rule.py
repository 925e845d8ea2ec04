"""Weights of the full-size fixtures: not stored, but generated from key names, as their JSON describes."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Array = np.ndarray


def _hift_exception(key: str, n: Array) -> Array | None:
    """Keys of HiFT with a scale of their own, so that f0 and audio are in their usual range."""
    if key == "f0_predictor.classifier.weight":
        return 10 * n
    if key == "f0_predictor.classifier.bias":
        return np.full_like(n, 60)
    if key == "conv_post.parametrizations.weight.original0":
        return 0.12 * (1 + 0.2 * n)
    if ".convs2." in key and key.endswith("original0"):
        return 0.3 * (1 + 0.2 * n)
    if key == "conv_post.bias":
        return 0.1 * n + np.where(np.arange(n.size) < n.size // 2, np.float32(0.8), np.float32(0))
    if key == "m_source.l_linear.weight":
        return 2 * n
    return None


def _named(key: str, n: Array) -> Array | None:
    """Keys whose scale depends on the name and not on the rank."""
    if key.endswith("original0"):
        return 1 + 0.2 * n
    if key.endswith("alpha"):
        return np.abs(1 + 0.2 * n) + 0.1
    if "pos_bias_" in key:
        return 0.3 * n
    if key == "input_embedding.weight":
        return n
    if key == "decoder.estimator.final_proj.weight":
        return n * np.float32(0.6 / 16)
    return None


def _draw(key: str, shape: tuple[int, ...]) -> Array:
    n = np.random.RandomState(zlib.crc32(key.encode()) & 0xFFFFFFFF).standard_normal(shape).astype(np.float32)
    for special in (_hift_exception(key, n), _named(key, n)):
        if special is not None:
            return special
    if n.ndim >= 2:
        scaled = n * np.float32(1 / math.sqrt(math.prod(shape[1:])))
        return scaled * 2 if "adaLN_modulation" in key else scaled
    return 1 + 0.1 * n if key.endswith("weight") else 0.1 * n


def generate_weights(shapes: Mapping[str, tuple[int, ...]], check: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """{key: shape} -> state_dict. ValueError if sums or samples differ from `check`, the JSON's "weight_check"."""
    arrays = {key: _draw(key, tuple(shape)) for key, shape in shapes.items()}
    total = sum(float(np.abs(array.astype(np.float64)).sum()) for array in arrays.values())
    if not math.isclose(total, check["sum_abs_float64"], rel_tol=1e-9):
        raise ValueError(f"generated weights sum to {total}, the fixture says {check['sum_abs_float64']}")
    for key, values in check["first_two_values"].items():
        if key not in arrays or not np.allclose(arrays[key].reshape(-1)[: len(values)], values, rtol=1e-6):
            raise ValueError(f"generated weights of {key} differ from the fixture's {values}")
    return {key: torch.from_numpy(array) for key, array in arrays.items()}
