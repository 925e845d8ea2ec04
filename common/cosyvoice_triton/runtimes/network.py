"""The interface of a network on any runtime: named tensors in, named tensors out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

Shape = tuple[int, ...]
Limits = Mapping[str, tuple[Shape, Shape, Shape]]  # of each input, the smallest, usual and largest shape


def check_shapes(limits: Limits, inputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError naming the first input that is missing, unknown or outside the limits."""
    if unlike := sorted(inputs.keys() ^ limits.keys()):
        raise ValueError(f"inputs {', '.join(sorted(inputs))}: expected {', '.join(limits)} ({unlike[0]!r})")
    for name, given in inputs.items():
        shape, (least, _, most) = tuple(given.shape), limits[name]
        sizes = zip(least, shape, most, strict=False)
        if len(shape) != len(most) or not all(low <= size <= high for low, size, high in sizes):
            raise ValueError(f"input {name!r} has shape {shape}: the network takes {least} to {most}")


class Network(ABC):
    """A network that is loaded and ready to run."""

    limits: Limits

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name, on the inputs' device; ValueError for a shape outside `limits`. Threads may call
        it at the same time."""
