"""Build one TensorRT plan from an ONNX network, and check it against onnxruntime."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cosyvoice_triton.export import precision
from cosyvoice_triton.runtimes import editions
from cosyvoice_triton.runtimes.network import ShapeLimits
from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork, log_of
from cosyvoice_triton.runtimes.workloads import Workload

CHECKED_SIZE = 64  # maximum of each dimension, because onnxruntime runs on the CPU
WORST_ERROR = 0.05  # relative to the outputs' root mean square


class BuildError(RuntimeError):
    """TensorRT built no plan, or one with wrong outputs."""


@dataclass
class Build:
    """TensorRT's objects for one plan. shapes: its profile, as TensorRT holds it."""

    workload: Workload
    log: Any
    builder: Any
    network: Any
    config: Any
    shapes: ShapeLimits

    @classmethod
    def of(cls, onnx: Path, workload: Workload, capability: str) -> "Build":
        """Parse and configure. BuildError with TensorRT's reason, ValueError if the ONNX file does not fit serving."""
        edition = editions.required()
        trt = edition.load()
        log = log_of(trt)
        builder = trt.Builder(log)
        # From version 11 on all networks are strongly typed, and the flag has no effect.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        if not parser.parse(precision.read(onnx, workload.precision)):
            logged = log.reason()  # taken in any case, so that it is not the reason of a later failure
            errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
            raise BuildError(f"TensorRT cannot read {onnx}: {'; '.join(errors) or logged}")
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        limits = workload.limits({tensor.name: tuple(tensor.shape) for tensor in inputs})
        config = builder.create_builder_config()
        if edition.portable:
            config.num_compute_capabilities = 1
            if not config.set_compute_capability(editions.target(edition, capability), 0):
                raise BuildError(f"TensorRT refuses compute capability {capability}: {log.reason()}")
        shapes = _add_profile(builder, config, limits, onnx)
        return cls(workload, log, builder, network, config, shapes)

    def plan(self) -> bytes:
        """The plan's bytes; BuildError with TensorRT's reason."""
        self.config.progress_monitor = monitor = _monitor(editions.required().load())
        engine = self.builder.build_serialized_network(self.network, self.config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if engine is None:
            raise BuildError(f"TensorRT built no plan of {self.workload.onnx}: {self.log.reason()}")
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


def _add_profile(builder: Any, config: Any, limits: ShapeLimits, onnx: Path) -> ShapeLimits:
    """Returns the profile as read back."""
    profile = builder.create_optimization_profile()
    for name, least in limits.least.items():
        profile.set_shape(name, least, limits.usual[name], limits.most[name])
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"TensorRT refuses the profile of {onnx.name}: {limits.least} to {limits.most}")
    held = {name: [tuple(shape) for shape in profile.get_shape(name)] for name in limits.least}
    return ShapeLimits(*({name: shapes[kind] for name, shapes in held.items()} for kind in range(3)))


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
