"""Trained networks computed by onnxruntime or TensorRT instead of torch, behind one interface (`network`).

The prompt models compute by onnxruntime on every machine, the flow on a CPU if asked to. TensorRT is experimental
(docs/results/README.md says what has not been run).
"""
