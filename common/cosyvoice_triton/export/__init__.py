"""Networks for other runtimes: export to ONNX (`onnx`), and TensorRT plans from that (`engines`)."""
