"""Fused GPU kernels in Triton (the language). Importing this package needs the package triton, which comes with CUDA
builds of torch."""

from cosyvoice_triton.kernels.attention import append, attend_blocks, attend_paged, rotate_first_head
from cosyvoice_triton.kernels.convolution import convolve_groups
from cosyvoice_triton.kernels.decoder import gate, gated, normed, project_add, project_heads, project_normed, turn_heads
from cosyvoice_triton.kernels.decoder_copied import gated_copied, project_heads_copied
from cosyvoice_triton.kernels.draw import begin, draw
from cosyvoice_triton.kernels.linear import add_norm_mish, linear
from cosyvoice_triton.kernels.pages import attend_pages
from cosyvoice_triton.kernels.relative import attend_relative
from cosyvoice_triton.kernels.snake import snake
from cosyvoice_triton.kernels.tiles import uses_tensor_cores
from cosyvoice_triton.kernels.vocoder import FrameConvolution, Lengths, convolve_frames, snake_factors

__all__ = [
    "FrameConvolution",
    "Lengths",
    "add_norm_mish",
    "append",
    "attend_blocks",
    "attend_paged",
    "attend_pages",
    "attend_relative",
    "begin",
    "convolve_frames",
    "convolve_groups",
    "draw",
    "gate",
    "gated",
    "gated_copied",
    "linear",
    "normed",
    "project_add",
    "project_heads",
    "project_heads_copied",
    "project_normed",
    "rotate_first_head",
    "snake",
    "snake_factors",
    "turn_heads",
    "uses_tensor_cores",
]
