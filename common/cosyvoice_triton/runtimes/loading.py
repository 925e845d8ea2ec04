"""Chooses the runtime of the flow's estimator and puts its networks in the place of torch's modules."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from cosyvoice_triton.config import FlowRuntime, PlanPrecision
from cosyvoice_triton.networks.flow.cache import EstimatorCache
from cosyvoice_triton.networks.flow.config import DiTConfig, UNetConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.runtimes import signatures
from cosyvoice_triton.runtimes.network import Network
from cosyvoice_triton.stacks import Stack

PROBE_FRAMES = 4  # the fewest that upstream's TensorRT profiles accept
logger = logging.getLogger(__name__)

PRECISIONS: dict[torch.dtype, PlanPrecision] = {torch.float32: "float32", torch.float16: "float16"}
# Channels of a head for which the kernels compile. Official networks have 64; Triton multiplies no less than 16.
HEAD_CHANNELS = 16, 32, 64


class OnRuntime(nn.Module):
    """The base of the replacements."""


class UNetOnRuntime(OnRuntime):
    """Replaces a `UNetEstimator`: one network for whole utterances, one for streams."""

    def __init__(self, config: UNetConfig, whole: Network, streaming: Network) -> None:
        super().__init__()
        self.config = config
        self._whole, self._streaming = whole, streaming

    def forward(
        self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, cond: Tensor, valid: Tensor, streaming: bool = False
    ) -> Tensor:
        """Compute the velocity as `UNetEstimator.forward` does."""
        return _velocity(self._streaming if streaming else self._whole, x, t, mu, speaker, cond, valid)


class DiTOnRuntime(OnRuntime):
    """Replaces a `DiTEstimator`: one network for whole utterances, one for prompts, one for the chunks after them.

    device, dtype: of its inputs and outputs, whatever the networks compute in.
    """

    def __init__(
        self,
        config: DiTConfig,
        whole: Network,
        prompt: Network,
        chunk: Network,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self._whole, self._prompt, self._chunk = whole, prompt, chunk
        self._device, self._dtype = device, dtype
        self._newest_first = self._puts_newest_first()

    def empty_cache(self, steps: int, rows: int) -> EstimatorCache:
        """Make an empty cache as `DiTEstimator.empty_cache` does."""
        return EstimatorCache.empty(self.config, steps, rows, self._device, self._dtype)

    def forward(self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, valid: Tensor) -> Tensor:
        """Compute the velocity as `DiTEstimator.forward` does."""
        return _velocity(self._whole, x, t, mu, speaker, condition, valid)

    def forward_chunk(
        self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, cache: EstimatorCache
    ) -> Tensor:
        """Compute a chunk as `DiTEstimator.forward_chunk` does, into `cache`, which already has room for the T
        frames."""
        T, attention = x.shape[2], cache.attention
        known = attention.frames - T
        network = self._chunk if known else self._prompt
        outputs = _run(network, signatures.CHUNK, self._inputs(x, t, mu, speaker, condition, cache))
        after = outputs["new_att_cache"]
        keys, values = (after[..., :T, :] if self._newest_first else after[..., known:, :]).chunk(2, dim=-1)
        attention.keys[..., known:, :] = keys
        attention.values[..., known:, :] = values
        cache.conv.copy_(signatures.split_convolutions(outputs["new_cnn_cache"]))
        return outputs["output"].to(x.dtype)

    def _puts_newest_first(self) -> bool:
        """Return whether the network puts new frames before the cached ones, as upstream's file does. Found by running
        it."""
        T = PROBE_FRAMES
        cache = self.empty_cache(1, 2)[0].with_room(2 * T)
        cache.attention.keys.fill_(1)
        cache.attention.values.fill_(1)
        x = cache.conv.new_zeros(2, self.config.out_channels, T)
        inputs = self._inputs(x, x[:, 0, :1].flatten(), x, x[..., 0], x, cache)
        after = self._chunk.run(inputs)["new_att_cache"]
        head, tail = after[..., :T, :], after[..., T:, :]  # the cached frames are ones
        if (head == 1).all() == (tail == 1).all():
            raise ValueError("the chunk-wise network's new_att_cache does not hold the frames of its att_cache")
        return bool((tail == 1).all())

    @staticmethod
    def _inputs(
        x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, cache: EstimatorCache
    ) -> dict[str, Tensor]:
        known = cache.attention.frames - x.shape[2]
        keys, values = cache.attention.keys[..., :known, :], cache.attention.values[..., :known, :]
        return {
            "x": x,
            "mu": mu,
            "t": t,
            "spks": speaker,
            "cond": condition,
            "cnn_cache": signatures.join_convolutions(cache.conv),
            "att_cache": torch.cat([keys, values], dim=-1),
        }


def _velocity(
    network: Network, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, valid: Tensor
) -> Tensor:
    inputs = {"x": x, "mask": valid.to(x.dtype), "mu": mu, "t": t, "spks": speaker, "cond": condition}
    return _run(network, signatures.WHOLE, inputs)["estimator_out"].to(x.dtype)


def _run(network: Network, axes: signatures.Axes, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a batch, in pieces if it has more rows than the network accepts: rows are independent."""
    most = network.limits["x"][2][0]
    if len(inputs["x"]) <= most:
        return network.run(inputs)
    axis = {name: next(axis for axis, dim in dims.items() if dim == "rows") for name, dims in axes.items()}
    split = {name: x.split(most, dim=axis[name]) for name, x in inputs.items()}
    pieces = [network.run(dict(zip(split, piece, strict=True))) for piece in zip(*split.values(), strict=True)]
    # The new caches have rows on the same axis as the old ones.
    return {
        name: torch.cat([piece[name] for piece in pieces], dim=axis.get(name.removeprefix("new_"), 0))
        for name in pieces[0]
    }


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

    ValueError: a setting does not fit, or a file is missing or unreadable. RuntimeError: no TensorRT plan fits.
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
        if max_hop_tokens > signatures.MAX_HOP_TOKENS:
            raise ValueError(
                f"TensorRT plans are for max_hop_tokens up to {signatures.MAX_HOP_TOKENS}, not {max_hop_tokens}"
            )
    precision = PRECISIONS.get(weight.dtype, "float32")
    uses = {workload.use: workload for workload in signatures.workloads(stack, precision, flow.decoder.rows)}
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


def _onnx(model_dir: Path, workload: signatures.Workload) -> Network:
    from cosyvoice_triton.runtimes.onnx import OnnxNetwork

    path = model_dir / workload.onnx
    if not path.exists():
        raise ValueError(f"{path} is missing; export it as docs/gpu.md describes")
    return OnnxNetwork(path)
