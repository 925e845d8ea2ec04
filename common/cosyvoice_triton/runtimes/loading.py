"""Chooses the runtime of the flow's estimator and loads its networks."""

import logging
from pathlib import Path

import torch
from torch import nn

from cosyvoice_triton.config import FlowRuntime, PlanPrecision
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.runtimes.estimators import DiTOnRuntime, UNetOnRuntime
from cosyvoice_triton.runtimes.network import Network
from cosyvoice_triton.runtimes.workloads import MAX_HOP_TOKENS, Workload, workloads
from cosyvoice_triton.stacks import Stack

logger = logging.getLogger(__name__)

PRECISIONS: dict[torch.dtype, PlanPrecision] = {torch.float32: "float32", torch.float16: "float16"}
# Channels of a head for which the kernels compile. Official networks have 64; Triton multiplies no less than 16.
HEAD_CHANNELS = 16, 32, 64


def flow_runtime(setting: FlowRuntime, device: torch.device | str) -> FlowRuntime:
    """Return the runtime that a setting means on a device. ValueError if it does not compute there.

    "auto" needs no files besides the checkpoint: CUDA graphs of fused kernels on a GPU, torch on a CPU.
    """
    on_gpu = torch.device(device).type == "cuda"
    if setting == "auto":
        return "cuda_graph" if on_gpu else "torch"
    if setting in ("cuda_graph", "tensorrt") and not on_gpu:
        raise ValueError(f"flow_runtime {setting!r} needs a GPU; this instance is on {device}: set auto or onnxruntime")
    if setting == "onnxruntime" and on_gpu:
        raise ValueError(f"flow_runtime {setting!r} computes on the CPU; this instance is on {device}: set auto")
    if setting == "torch" and on_gpu:
        logger.info("flow_runtime torch launches every kernel separately: cuda_graph is faster")
    return setting


def use_runtime(
    flow: CosyVoice3Flow | DiTFlow | UNetFlow,
    stack: Stack,
    runtime: FlowRuntime,
    model_dir: Path,
    *,
    device: torch.device | str,
    max_hop_tokens: int,
) -> None:
    """Replace the estimator of `flow` by networks of `model_dir` on another runtime; nothing to do for torch.

    ValueError: a setting does not fit, or a file is missing or unreadable. PlanError: no TensorRT plan fits.
    ImportError: TensorRT is not installed.
    """
    if runtime not in ("onnxruntime", "tensorrt"):
        return
    if isinstance(flow, CosyVoice3Flow):
        raise ValueError(f"flow_runtime {runtime!r}: the flow of the stack {stack.name!r} runs in torch only; set auto")
    weight = flow.spk_embed_affine_layer.weight
    if runtime == "tensorrt":
        if weight.dtype not in PRECISIONS:
            raise ValueError(f"there are no TensorRT plans in {weight.dtype}: set flow_precision=float16")
        if max_hop_tokens > MAX_HOP_TOKENS:
            raise ValueError(f"TensorRT plans are for max_hop_tokens up to {MAX_HOP_TOKENS}, not {max_hop_tokens}")
    precision = PRECISIONS.get(weight.dtype, "float32")
    uses = {workload.use: workload for workload in workloads(stack, precision, flow.decoder.rows)}
    loaded: dict[str, Network] = {}  # ONNX networks by file; each use has its own plan

    def load(use: str) -> Network:
        if runtime == "tensorrt":
            from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork

            return TensorRTNetwork.load(uses[use], model_dir, device)
        if uses[use].onnx not in loaded:
            loaded[uses[use].onnx] = _onnx(model_dir, uses[use])
        return loaded[uses[use].onnx]

    estimator: nn.Module
    if isinstance(flow, UNetFlow):
        estimator = UNetOnRuntime(flow.config.estimator, load("whole"), load("streaming"))
    else:
        networks = load("whole"), load("prompt"), load("chunk")
        estimator = DiTOnRuntime(flow.config.estimator, *networks, weight.device, weight.dtype)
    flow.decoder.add_module("estimator", estimator)
    logger.info("the flow's estimator runs in %s", runtime)


def check_heads(flow: CosyVoice3Flow | DiTFlow | UNetFlow) -> None:
    """Raise ValueError unless the kernels of `cuda_graph` compute attention with the flow's heads."""
    sizes = {flow.config.estimator.head_dim}
    if isinstance(flow, DiTFlow | UNetFlow):
        sizes.add(flow.config.encoder.width // flow.config.encoder.heads)
    if other := sizes.difference(HEAD_CHANNELS):
        raise ValueError(
            f"flow_runtime 'cuda_graph' has kernels for heads of {HEAD_CHANNELS} channels; the flow has heads of "
            f"{sorted(other)}: set flow_runtime to torch"
        )


def _onnx(model_dir: Path, workload: Workload) -> Network:
    from cosyvoice_triton.runtimes.onnx import OnnxNetwork

    path = model_dir / workload.onnx
    if not path.exists():
        raise ValueError(f"{path} is missing; export it as docs/gpu.md describes")
    return OnnxNetwork(path)
