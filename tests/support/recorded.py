"""Tensor operations recorded and repeated, as a CUDA graph repeats them."""

from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class Recorded(TorchFunctionMode):
    """The tensor operations that are run within it. As in a CUDA graph, `replay` repeats them on the same tensors, and
    everything that Python computed between them stays as it was."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self._calls.append((function, args, kwargs or {}, function(*args, **(kwargs or {}))))
        return self._calls[-1][-1]

    def replay(self):
        made = {}  # by the identity of the tensor that the recording made
        for function, args, kwargs, recorded in self._calls:
            args, kwargs = tree_map(lambda value: made.get(id(value), value), (args, kwargs))
            result = function(*args, **kwargs)
            made.update(zip(map(id, tree_leaves(recorded)), tree_leaves(result), strict=True))
