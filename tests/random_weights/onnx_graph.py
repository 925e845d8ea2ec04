"""A small builder over `onnx.helper`, to write networks as ONNX operators in the form of the official exports."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET = 20
IR_VERSION = 10  # read by every onnxruntime that reads the opset


class OnnxGraph:
    """Nodes and weights in the order of their creation; every method returns the name of a tensor."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def weight(self, name: str, value: np.ndarray) -> str:
        """Add a float32 initializer and return its name."""
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name))
        return name

    def half_weight(self, name: str, value: np.ndarray) -> str:
        """Add a float16 initializer, half the size, for a node to cast, and return its name."""
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(value, np.float16), name))
        return name

    def constant(self, value: np.ndarray | float) -> str:
        """Add a Constant node. Only weights may be initializers: s3tokenizer reads all of them as weights."""
        array = np.float32(value) if isinstance(value, float) else value
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def op(self, kind: str, *inputs: str, name: str = "", output: str = "", **attributes: Any) -> str:
        """Add one node and return its one output. name: of the node, by which s3tokenizer identifies weights."""
        index = len(self._nodes)
        output = output or f"value_{index}"
        node = helper.make_node(kind, list(inputs), [output], name=name or f"/{kind}_{index}", **attributes)
        self._nodes.append(node)
        return output

    def save(self, path: Path, inputs: Iterable[Any], outputs: Iterable[Any], about: str) -> None:
        """Check and write the model. inputs, outputs: name, type and dimensions of each. about: its doc string."""
        given, made = ([helper.make_tensor_value_info(*value) for value in of] for of in (inputs, outputs))
        graph = helper.make_graph(self._nodes, "network", given, made, self._weights)
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], producer_name="tests.random_weights", doc_string=about)
        model.ir_version = IR_VERSION
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(path))
