"""Fused GPU kernels in Triton (the language). Importing this package needs a GPU build of torch."""

from common.kernels.attention import append, attend_blocks, attend_paged
from common.kernels.linear import add_norm_mish, linear
from common.kernels.snake import snake

__all__ = ["add_norm_mish", "append", "attend_blocks", "attend_paged", "linear", "snake"]
