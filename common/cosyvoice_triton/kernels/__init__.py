"""Fused GPU kernels in Triton (the language). Importing this package needs the package triton, which comes with CUDA
builds of torch."""

from cosyvoice_triton.kernels.attention import append, attend_blocks, attend_paged, rotate_first_head
from cosyvoice_triton.kernels.decoder import (
    apply_rope,
    gated,
    linear_residual,
    project_heads,
    rms_norm,
    rms_norm_linear,
    silu_and_mul,
)
from cosyvoice_triton.kernels.decoder_tma import gated_tma, project_heads_tma
from cosyvoice_triton.kernels.linear import add_norm_mish, convolve_groups, linear
from cosyvoice_triton.kernels.pages import attend_pages
from cosyvoice_triton.kernels.relative import attend_relative
from cosyvoice_triton.kernels.sampling import begin, sample
from cosyvoice_triton.kernels.tiles import uses_tensor_cores
from cosyvoice_triton.kernels.vocoder import FrameConvolution, Lengths, convolve_frames, snake, snake_factors
