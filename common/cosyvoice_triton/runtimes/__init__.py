"""Trained networks computed by onnxruntime or TensorRT instead of torch, behind one interface (`network`)."""
