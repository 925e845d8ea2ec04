"""The flows' estimators on another runtime than torch: drop-in replacements of the modules in
`cosyvoice_triton.networks.flow`."""

import torch
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.cache import EstimatorCache
from cosyvoice_triton.networks.flow.config import DiTConfig, UNetConfig
from cosyvoice_triton.runtimes.network import Network
from cosyvoice_triton.runtimes.signatures import CHUNK, WHOLE, Axes, join_convolutions, split_convolutions

PROBE_FRAMES = 4  # the fewest that upstream's TensorRT profiles accept


class OnRuntime(nn.Module):
    """The base of the replacements."""


class UNetOnRuntime(OnRuntime):
    """Replaces a `UNetEstimator`: one network for whole utterances, one for streams."""

    def __init__(self, config: UNetConfig, whole: Network, streaming: Network) -> None:
        super().__init__()
        self.config = config
        self._whole, self._streaming = whole, streaming

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        mu: Tensor,
        speaker: Tensor,
        condition: Tensor,
        valid: Tensor,
        streaming: bool = False,
    ) -> Tensor:
        """Compute the velocity as `UNetEstimator.forward` does."""
        return _velocity(self._streaming if streaming else self._whole, x, t, mu, speaker, condition, valid)


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
        outputs = _run(network, CHUNK, self._inputs(x, t, mu, speaker, condition, cache))
        after = outputs["new_att_cache"]
        keys, values = (after[..., :T, :] if self._newest_first else after[..., known:, :]).chunk(2, dim=-1)
        attention.keys[..., known:, :] = keys
        attention.values[..., known:, :] = values
        cache.conv.copy_(split_convolutions(outputs["new_cnn_cache"]))
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
            "cnn_cache": join_convolutions(cache.conv),
            "att_cache": torch.cat([keys, values], dim=-1),
        }


def _velocity(
    network: Network, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, valid: Tensor
) -> Tensor:
    inputs = {"x": x, "mask": valid.to(x.dtype), "mu": mu, "t": t, "spks": speaker, "cond": condition}
    return _run(network, WHOLE, inputs)["estimator_out"].to(x.dtype)


def _run(network: Network, axes: Axes, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a batch, in pieces if it has more rows than the network accepts: rows are independent."""
    most = network.limits.most["x"][0]
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
