"""Build one TensorRT plan from an ONNX network, and check it against onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.accel.network import ShapeLimits
from common.accel.plans import write_atomically
from common.accel.tensorrt import TensorRTNetwork, import_tensorrt, new_log
from common.accel.workloads import Workload
from tools.export import precision

CHECKED_SIZE = 64  # maximum of each dimension, because onnxruntime runs on the CPU
WORST_ERROR = 0.05  # relative to the outputs' root mean square


class BuildError(RuntimeError):
    """TensorRT built no plan, or one with wrong outputs."""


def build(onnx: Path, workload: Workload, timings: Path) -> bytes:
    """The plan of `workload`. timings: TensorRT's timing cache, read if it exists, and written.

    BuildError with TensorRT's reason, ValueError if the ONNX file does not fit serving.
    """
    trt = import_tensorrt()
    log = new_log(trt)
    builder = trt.Builder(log)
    # From version 11 on all networks are strongly typed, and the flag has no effect.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(precision.read(onnx, workload.precision)):
        errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise BuildError(f"TensorRT cannot read {onnx}: {'; '.join(errors) or log.reason()}")
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    limits = workload.limits({tensor.name: tuple(tensor.shape) for tensor in inputs})
    config = builder.create_builder_config()
    _add_profile(builder, config, limits, onnx)
    cache = _read_timings(config, timings)
    config.progress_monitor = monitor = _monitor(trt)
    engine = builder.build_serialized_network(network, config)
    if monitor.interrupted:
        raise KeyboardInterrupt
    if engine is None:
        raise BuildError(f"TensorRT built no plan of {onnx.name}: {log.reason()}")
    write_atomically(timings, bytes(cache.serialize()))
    return bytes(engine)


def check(engine: bytes, onnx: Path, workload: Workload, device: torch.device | str) -> float:
    """The error of the plan against the float32 ONNX file on random inputs, relative to the outputs' root mean square.

    BuildError if it exceeds WORST_ERROR.
    """
    import onnxruntime

    loaded = TensorRTNetwork(engine, onnx.name, device)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.rand(shape, generator=generator) if name == precision.TIME else _noise(name, shape, generator)
        for name, shape in _checked_shapes(loaded.limits).items()
    }
    session = onnxruntime.InferenceSession(str(onnx), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    expected = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    found = loaded.run({name: tensor.to(device) for name, tensor in inputs.items()})
    worst = max(_error(found[name].float().cpu().numpy(), want) for name, want in zip(names, expected, strict=True))
    if not worst <= WORST_ERROR:  # also true for NaN
        raise BuildError(
            f"the {workload.precision} plan of {onnx.name} is wrong: {100 * worst:.1f} % away from the ONNX file, "
            f"{100 * WORST_ERROR:g} % is the limit; try another --precision"
        )
    return worst


def _add_profile(builder: Any, config: Any, limits: ShapeLimits, onnx: Path) -> None:
    profile = builder.create_optimization_profile()
    for name, least in limits.least.items():
        profile.set_shape(name, least, limits.usual[name], limits.most[name])
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"TensorRT refuses the profile of {onnx.name}: {limits.least} to {limits.most}")


def _read_timings(config: Any, path: Path) -> Any:
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")  # made by another driver, or damaged: start over
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _monitor(trt: Any) -> Any:
    """Progress bars for the outermost phases of a build, which takes minutes. Exceptions do not pass through TensorRT,
    so Ctrl-C is recorded."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._bars: dict[str, tqdm] = {}
            self.interrupted = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._bars[phase_name] = tqdm(total=num_steps, desc=phase_name, unit="step", leave=False, disable=None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                if phase_name in self._bars:
                    self._bars[phase_name].update()
            except KeyboardInterrupt:
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self._bars:
                self._bars.pop(phase_name).close()

    return Monitor()


def _checked_shapes(limits: ShapeLimits) -> dict[str, tuple[int, ...]]:
    """The usual shapes, reduced where they would take long on the CPU."""
    return {
        name: tuple(
            size if limits.most[name][axis] == size else max(limits.least[name][axis], min(size, CHECKED_SIZE))
            for axis, size in enumerate(shape)
        )
        for name, shape in limits.usual.items()
    }


def _noise(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.ones(shape) if name == "mask" else torch.randn(shape, generator=generator)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    scale = np.sqrt(np.mean(np.square(expected)))
    return float(np.sqrt(np.mean(np.square(found - expected))) / max(scale, 1e-6))
