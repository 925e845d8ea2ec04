"""Convert a float32 ONNX network to half precision: TensorRT computes in the types of the network.

The flow time and everything computed from it before the first matrix product stay in float32: half precision cannot
distinguish neighbouring Euler steps. TensorRT itself accumulates products, norms and softmax in float32.

onnxruntime's converter cannot exclude two nodes that share an input, as the time's sine and cosine do; NVIDIA's, in
nvidia-modelopt, needs an older onnx than the rest of this project.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from cosyvoice_triton.config import PlanPrecision

TIME = "t"
_AFTER_TIME = {"MatMul", "Gemm", "Conv", "Shape", "Size"}  # their outputs no longer count as time
# Masks add -1e10, which is an infinity in float16; a fully masked row would then be NaN.
LARGEST = 1e4


def read(path: Path, precision: PlanPrecision) -> bytes:
    """Return the ONNX file, including external data, as one message in `precision`; ValueError if it cannot be read."""
    try:
        model = onnx.load(str(path))
    except Exception as error:  # the errors of protobuf and onnx have no common base class
        raise ValueError(f"{path} is not an ONNX file: {error}") from None
    if precision == "float16":
        _retype_graph(model.graph)
    return model.SerializeToString()


def _retype_graph(graph: GraphProto) -> None:
    """Change all float32 values of a network to float16, except those of the time."""
    time_nodes = _time_nodes(graph)
    _separate(graph, time_nodes)
    kept = {name for node in time_nodes for name in node.input}
    del graph.value_info[:]  # they are declared float32
    for value in (*graph.input, *graph.output):
        if value.name not in kept and value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _retype(tensor)
    timed = {node.output[0] for node in time_nodes}
    for node in graph.node:
        if node.output[0] not in timed:
            _retype_attributes(node)


def _time_nodes(graph: GraphProto) -> list[NodeProto]:
    """Return the nodes between the time and the first matrix product, including constants that only they use."""
    reached = {TIME} & {value.name for value in graph.input}
    nodes = []
    for node in graph.node:  # in topological order
        if node.op_type not in _AFTER_TIME and reached.intersection(node.input):
            reached.update(node.output)
            nodes.append(node)
    needed = {name for node in nodes for name in node.input}
    constants = [n for n in graph.node if n.op_type == "Constant" and needed.intersection(n.output)]
    return constants + nodes


def _separate(graph: GraphProto, time_nodes: list[NodeProto]) -> None:
    """Give the time's nodes their own copies of shared constants, and cast their outputs."""
    inside = {id(node) for node in time_nodes}
    outside = [node for node in graph.node if id(node) not in inside]
    used = {name for node in outside for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in used]:
        if sharing := [node for node in time_nodes if tensor.name in node.input]:
            own = graph.initializer.add()
            own.CopyFrom(tensor)
            own.name = f"{tensor.name}_time"
            _rename(sharing, tensor.name, own.name)
    for node in list(time_nodes):
        for name in used.intersection(node.output):
            cast = helper.make_node("Cast", [name], [f"{name}_cast"], to=TensorProto.FLOAT16, name=f"{name}_cast")
            _rename(outside, name, cast.output[0])
            graph.node.insert(list(graph.node).index(node) + 1, cast)


def _retype_attributes(node: NodeProto) -> None:
    if node.op_type == "ConstantOfShape" and not node.attribute:  # float32 zeros by default
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float32))))
    for attribute in node.attribute:
        if attribute.HasField("t"):
            _retype(attribute.t)
        elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16


def _retype(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        values: np.ndarray = np.clip(numpy_helper.to_array(tensor), -LARGEST, LARGEST).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _rename(nodes: Iterable[NodeProto], name: str, other: str) -> None:
    for node in nodes:
        for index, used in enumerate(node.input):
            if used == name:
                node.input[index] = other
