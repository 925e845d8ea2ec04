"""Trained networks behind whatever computes them: torch, onnxruntime or TensorRT, one interface (`network`)."""
