"""Chooses the runtime of the flow's estimator and loads its networks."""

import logging
from pathlib import Path

import torch
from torch import nn

from cosyvoice_triton.config import FlowRuntime, Token2WavConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.runtimes.estimators import DiTOnRuntime, UNetOnRuntime
from cosyvoice_triton.runtimes.network import Network
from cosyvoice_triton.runtimes.workloads import PlanPrecision, Serving
from cosyvoice_triton.stacks import Stack

logger = logging.getLogger(__name__)

PRECISIONS: dict[torch.dtype, PlanPrecision] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def flow_runtime(setting: FlowRuntime, device: torch.device | str) -> FlowRuntime:
    """The runtime that a setting means on a device. ValueError for CUDA graphs or TensorRT without a GPU.

    "auto" needs no files besides the checkpoint: CUDA graphs of fused kernels on a GPU, torch on a CPU.
    """
    on_gpu = torch.device(device).type == "cuda"
    if setting == "auto":
        return "cuda_graph" if on_gpu else "torch"
    if setting in ("cuda_graph", "tensorrt") and not on_gpu:
        raise ValueError(f"flow_runtime {setting!r} needs a GPU; this instance is on {device}: set auto or onnxruntime")
    if setting == "torch" and on_gpu:
        logger.info("flow_runtime torch launches every kernel separately: cuda_graph is faster")
    return setting


def use_runtime(
    flow: CosyVoice3Flow | DiTFlow | UNetFlow,
    stack: Stack,
    runtime: FlowRuntime,
    model_dir: str | Path,
    *,
    device: torch.device | str,
    max_streams: int,
    max_hop_tokens: int = Token2WavConfig.max_hop_tokens,
    contexts: int = Token2WavConfig.flow_contexts,
) -> None:
    """Replace the estimator of `flow` by networks of `model_dir` on another runtime; nothing to do for torch.

    max_streams, max_hop_tokens: the settings that TensorRT plans have to be built for; contexts: execution contexts of
    each plan. ValueError: a file is missing or unreadable. PlanError: no TensorRT plan fits. ImportError: TensorRT is
    not installed.
    """
    if runtime not in ("onnxruntime", "tensorrt"):
        return
    if isinstance(flow, CosyVoice3Flow):
        raise ValueError(f"flow_runtime {runtime!r}: the flow of the stack {stack.name!r} runs in torch only; set auto")
    weight = flow.spk_embed_affine_layer.weight
    serving = Serving(PRECISIONS[weight.dtype], max_streams, max_hop_tokens)
    uses = {workload.use: workload for workload in serving.workloads(stack)}
    loaded: dict[str, Network] = {}  # ONNX networks by file; each use has its own plan

    def load(use: str) -> Network:
        workload = uses[use]
        if runtime == "tensorrt":
            from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork

            return TensorRTNetwork.load(workload, model_dir, device, contexts=contexts)
        if workload.onnx not in loaded:
            loaded[workload.onnx] = _onnx(Path(model_dir), workload.onnx, device)
        return loaded[workload.onnx]

    estimator: nn.Module
    if isinstance(flow, UNetFlow):
        estimator = UNetOnRuntime(flow.config.estimator, load("whole"), load("streaming"))
    else:
        networks = load("whole"), load("prompt"), load("chunk")
        estimator = DiTOnRuntime(flow.config.estimator, *networks, weight.device, weight.dtype)
    flow.decoder.add_module("estimator", estimator)
    logger.info("the flow's estimator runs in %s", runtime)


def _onnx(model_dir: Path, file: str, device: torch.device | str) -> Network:
    from cosyvoice_triton.runtimes.onnx import OnnxNetwork

    path = model_dir / file
    if not path.exists():
        raise ValueError(f"{path} is missing; export it as docs/gpu.md describes")
    return OnnxNetwork(path, device)
