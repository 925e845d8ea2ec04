"""Which edition of TensorRT a process uses, and for which GPUs it builds plans."""

import importlib.util
import sys
import types

import pytest
from cosyvoice_triton.runtimes import editions
from cosyvoice_triton.runtimes.plans import Machine

from tests.support import fake_tensorrt


def test_the_edition_from_pypi_is_installed_and_targets_six_compute_capabilities() -> None:
    edition = editions.installed()
    assert edition is editions.RTX and edition.version.startswith("tensorrt_rtx 1.")
    for capability in ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"):
        assert Machine.ahead(capability) == Machine("any", capability, edition.version)
    with pytest.raises(ValueError, match=r"builds no plans for compute capability 9.0, only for 7.5, 8.0, 8.6, 8.9"):
        Machine.ahead("9.0")


def test_nvidias_edition_is_used_first_and_builds_for_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install(monkeypatch)
    assert editions.installed() is editions.FULL
    with pytest.raises(
        ValueError, match=r"tensorrt 10.11.0.33 builds no plans .* 8.9, only for the GPU of the machine"
    ):
        Machine.ahead("8.9")


def test_without_tensorrt_or_with_an_old_version_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("tensorrt")
    old.__version__ = "8.6.1"
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(ImportError, match=r"tensorrt 8.6.1 is too old: 10.0 or newer"):
        editions.FULL.load()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Machine.here("cpu").tensorrt == "none"
    with pytest.raises(ImportError, match="TensorRT is not installed; .*tensorrt-rtx-cu13-bindings"):
        editions.required()
