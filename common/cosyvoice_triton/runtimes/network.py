"""The interface of a network on any runtime: named tensors in, named tensors out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeLimits:
    """The smallest, usual and largest shape of each input that a network accepts, by the name of the input."""

    least: Mapping[str, Shape]
    usual: Mapping[str, Shape]
    most: Mapping[str, Shape]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError naming the first input that is missing, unknown or outside the limits."""
        if unlike := sorted(shapes.keys() ^ self.most.keys()):
            raise ValueError(f"inputs {', '.join(sorted(shapes))}: expected {', '.join(self.most)} ({unlike[0]!r})")
        for name, shape in shapes.items():
            least, most = self.least[name], self.most[name]
            fits = len(shape) == len(most) and all(
                low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
            )
            if not fits:
                raise ValueError(f"input {name!r} has shape {shape}: the network takes {least} to {most}")


class Network(ABC):
    """A network that is loaded and ready to run."""

    limits: ShapeLimits

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name, on the inputs' device; ValueError for a shape outside `limits`. Threads may call
        it at the same time."""
