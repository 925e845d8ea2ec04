"""Trained networks computed by onnxruntime or TensorRT instead of torch, behind one interface (`network`).

Experimental and frozen: TensorRT plans, and onnxruntime for the flow (docs/results/README.md says what has not been
run). The prompt models compute by onnxruntime on every machine.
"""
