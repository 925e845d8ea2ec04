"""Build the TensorRT plans of a stack ahead of serving, from its ONNX files.

Plans go to the folder tensorrt beside these files. Plans that fit are kept, so an interrupted build continues where it
stopped. The package tensorrt builds for the GPU and the version that are here: its plans work with no other, take
minutes each and need the GPU to themselves. With tensorrt_rtx plans take seconds and are for all GPUs of a compute
capability: this machine's, or given ones, for which no GPU is needed here. A plan is compared with its ONNX file before
it is kept, if its GPU is here.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cosyvoice_triton.config import PlanPrecision
from cosyvoice_triton.export import precision
from cosyvoice_triton.networks.flow.config import FlowConfig, stated_solve
from cosyvoice_triton.runtimes import tensorrt
from cosyvoice_triton.runtimes.network import Limits
from cosyvoice_triton.runtimes.onnx import OnnxNetwork
from cosyvoice_triton.runtimes.signatures import Workload, workloads
from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork, log_of
from cosyvoice_triton.stacks import Stack

CHECKED_SIZE = 64  # maximum of each dimension that varies, because onnxruntime computes on the CPU
WORST_ERROR = 0.05  # relative to the outputs' root mean square


def build(onnx: Path, workload: Workload, capability: str = "") -> bytes:
    """Build a plan for this GPU, or for a compute capability. RuntimeError with TensorRT's reason, ValueError if the
    ONNX file does not fit serving."""
    trt = tensorrt.tensorrt()
    log = log_of(trt)
    builder = trt.Builder(log)
    # From version 11 on all networks are strongly typed, and the flag has no effect.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(precision.read(onnx, workload.precision)):
        log.reason()  # taken, so that it is not the reason of a later failure
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise RuntimeError(f"TensorRT cannot read {onnx}: {errors}")
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    limits = workload.limits({tensor.name: tuple(tensor.shape) for tensor in inputs})
    config = builder.create_builder_config()
    if capability:
        config.num_compute_capabilities = 1
        config.set_compute_capability(tensorrt.capabilities()[capability], 0)
    profile = builder.create_optimization_profile()
    for name, shapes in limits.items():
        profile.set_shape(name, *shapes)
    if config.add_optimization_profile(profile) < 0:
        least, most = ({name: shapes[end] for name, shapes in limits.items()} for end in (0, 2))
        raise RuntimeError(f"TensorRT refuses the profile of {onnx.name}: {least} to {most}")
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise RuntimeError(f"TensorRT built no plan of {workload.onnx}: {log.reason()}")
    return bytes(engine)


def check(engine: bytes, onnx: Path, device: torch.device | str) -> None:
    """Compare a plan with the float32 ONNX file on random inputs. RuntimeError if it differs by more than
    WORST_ERROR."""
    loaded = TensorRTNetwork(engine, onnx.name, device)
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.rand(shape, generator=generator) for name, shape in _checked_shapes(loaded.limits).items()}
    if "mask" in inputs:
        inputs["mask"] = torch.ones_like(inputs["mask"])
    found = loaded.run(inputs)
    for name, want in OnnxNetwork(onnx).run(inputs).items():
        error = float((found[name].float().cpu() - want).square().mean() / want.square().mean().clamp(min=1e-12)) ** 0.5
        if not error <= WORST_ERROR:  # also true for NaN
            raise RuntimeError(
                f"the plan of {onnx.name} is wrong: {name} is {100 * error:.1f} % away from the ONNX file, "
                f"{100 * WORST_ERROR:g} % is the limit; try another --precision"
            )


def _checked_shapes(limits: Limits) -> dict[str, tuple[int, ...]]:
    """Return the usual shapes, reduced where they would take long on the CPU."""

    def reduced(least: int, usual: int, most: int) -> int:
        return usual if usual == most else max(least, min(usual, CHECKED_SIZE))

    return {name: tuple(map(reduced, *shapes)) for name, shapes in limits.items()}


def build_missing(model_dir: Path, workload: Workload, device: str, capability: str) -> str:
    """Build a plan unless it exists, and compare it if the GPU is here; return what was done."""
    machine = tensorrt.target(capability) if capability else tensorrt.machine(device)
    plan = tensorrt.plan_file(workload, model_dir, machine)
    if plan.is_file():
        return f"exists already: {plan.name}"
    ahead = capability or (machine.split()[-1] if tensorrt.installed() == tensorrt.RTX else "")
    onnx = model_dir / workload.onnx
    engine = build(onnx, workload, ahead)
    if not capability:
        check(engine, onnx, device)
    tensorrt.write_plan(plan, engine)
    return f"built {plan.name}, {len(engine) / 1e6:.1f} MB" + (", not compared" if capability else "")


def build_all(
    stack: Stack, model_dir: Path, flow_precision: PlanPrecision, capabilities: Sequence[str], device: str
) -> bool:
    """Build all plans of a stack, for the GPU or for compute capabilities, and print each; return whether all exist."""
    tensorrt.tensorrt()
    rows = FlowConfig(**stated_solve(model_dir / stack.flow)).rows
    wanted = [(each, of) for of in capabilities or [""] for each in workloads(stack, flow_precision, rows)]
    failed = 0
    for workload, capability in wanted:
        print(f"{workload.use} {capability}: {workload.onnx}, {workload.precision}", flush=True)
        try:
            print(f"    {build_missing(model_dir, workload, device, capability)}", flush=True)
        except (RuntimeError, ValueError, OSError) as error:
            print(f"    failed: {error}", file=sys.stderr, flush=True)
            failed += 1
    print(f"{len(wanted) - failed} of {len(wanted)} plans exist")
    return not failed
