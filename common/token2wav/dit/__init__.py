"""Step-Audio2's DiT flow over streams.

The same DiT block is written three times. All three read one set of weights, `common.flow.dit.DiTBlock`:

1. Module: `DiTBlock` in `common.flow.dit`, the definition. It computes whole utterances on every device, is trained,
   and is what is exported to ONNX (`common.accel.signatures.NextChunk`: the same `forward_chunk`, with caches that grow
   by concatenation), so also what onnxruntime and TensorRT compute.
2. Plain solver: `DiTSolver._block` in `solver`. Chunks of many streams in one batch, in torch operations, on a CPU or
   on a GPU without CUDA graphs. q, k and v are one matrix, convolutions are matrix products, adaLN's modulation is
   computed once per Euler step at load, and the context comes from the streams' own memory.
3. Fused solver: `FusedDiTSolver._block` in `graphs`, a subclass of the plain solver that keeps its weights, its Euler
   loop and its inputs and replaces the block by seven Triton kernels (`common.kernels`), captured as CUDA graphs.

What is equal: up to rounding, all three give the same velocity for the same frames and context. A stream's context is
the prompt and its most recent frames; the module, given a cache cut to those, gives the same mel.

What holds them together: golden fixtures of upstream pin the module (tests/flow/test_parity.py); the plain solver is
compared with the module, chunk by chunk (tests/token2wav/test_engine.py); the fused solver with the plain one, and each
kernel with its torch operations, on a GPU (tests/token2wav/test_gpu.py); the exported module with torch's, call by call
and as streams (tests/accel/test_onnx.py).
"""
