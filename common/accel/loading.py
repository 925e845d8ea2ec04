"""Which runtime computes which network, and where its files are."""

import logging
from pathlib import Path

import torch
from torch import nn

from common.accel.estimators import DiTOnRuntime, UNetOnRuntime
from common.accel.network import Network
from common.accel.signatures import DIT, DIT_CHUNK, UNET, UNET_STREAMING, Signature
from common.config import FlowRuntime
from common.flow.dit_flow import DiTFlow
from common.flow.unet_flow import UNetFlow

logger = logging.getLogger(__name__)


def flow_runtime(setting: FlowRuntime, device: torch.device | str) -> FlowRuntime:
    """What computes the flow's estimator. ValueError for CUDA graphs or TensorRT without a GPU.

    "auto" is what was measured to be the fastest: CUDA graphs of fused kernels on a GPU, torch on a CPU (see
    docs/accelerators.md).
    """
    on_gpu = torch.device(device).type == "cuda"
    if setting == "auto":
        return "cuda_graph" if on_gpu else "torch"
    if setting in ("cuda_graph", "tensorrt") and not on_gpu:
        raise ValueError(f"flow_runtime {setting!r} needs a GPU; this instance is on {device}: set auto or onnxruntime")
    return setting


def use_runtime(
    flow: UNetFlow | DiTFlow, runtime: FlowRuntime, model_dir: str | Path, device: torch.device | str
) -> None:
    """Put the estimator of `flow` on a runtime other than torch: its weights go, a network of `model_dir` comes."""
    if runtime not in ("onnxruntime", "tensorrt"):
        return
    files = (UNET, UNET_STREAMING) if isinstance(flow, UNetFlow) else (DIT, DIT_CHUNK)
    whole, streamed = (_load(signature, runtime, Path(model_dir), device) for signature in files)
    weight = flow.encoder_proj.weight
    estimator: nn.Module
    if isinstance(flow, UNetFlow):
        estimator = UNetOnRuntime(flow.config.estimator, whole, streamed)
    else:
        estimator = DiTOnRuntime(flow.config.estimator, whole, streamed, weight.device, weight.dtype)
    flow.decoder.add_module("estimator", estimator)
    logger.info("the flow's estimator runs in %s", runtime)


def _load(signature: Signature, runtime: FlowRuntime, model_dir: Path, device: torch.device | str) -> Network:
    path = model_dir / signature.file
    if not path.exists():
        raise ValueError(f"{path} is not there; make it with: python -m scripts.export_onnx --model-dir {model_dir}")
    if runtime == "tensorrt":
        from common.accel.tensorrt import TensorRTNetwork

        return TensorRTNetwork(path, device)
    from common.accel.onnx import OnnxNetwork

    return OnnxNetwork(path, device)
