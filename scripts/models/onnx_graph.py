"""A small writer for ONNX graphs, shared by the conversion scripts.

It names nodes and constants by counting, so that the same conversion always gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Old enough for every ONNX Runtime in use; nothing here needs more.
OPSET = 13
IR_VERSION = 8

Shape = "list[int | str]"


class GraphWriter:
    """Collects nodes in order of computation. Values are handled by name."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Shape) -> str:
        """An f32 input; a dimension given as text is dynamic."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def output(self, name: str, value: str, shape: Shape) -> None:
        """Publishes `value` as the f32 output `name`."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"output_{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def constant(self, array: np.ndarray) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def floats(self, values: Any) -> str:
        return self.constant(np.asarray(values, dtype=np.float32))

    def ints(self, values: Any) -> str:
        return self.constant(np.asarray(values, dtype=np.int64))

    def op(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """Adds a node with one output and gives that output's name."""
        return self.op_many(kind, inputs, 1, **attributes)[0]

    def op_many(self, kind: str, inputs: list[str], output_count: int, **attributes: Any) -> list[str]:
        name = f"{kind.lower()}_{len(self._nodes)}"
        outputs = [name] if output_count == 1 else [f"{name}_{i}" for i in range(output_count)]
        self._nodes.append(helper.make_node(kind, inputs, outputs, name=name, **attributes))
        return outputs

    def save(self, path: Path, graph_name: str, metadata: dict[str, str] | None = None) -> None:
        """Checks the model (types and shapes too) and writes it under a temporary name first."""
        graph = helper.make_graph(self._nodes, graph_name, self._inputs, self._outputs, self._constants)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="croprow-scripts"
        )
        model.ir_version = IR_VERSION
        helper.set_model_props(model, metadata or {})
        onnx.checker.check_model(model, full_check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(model.SerializeToString(deterministic=True))
        part.replace(path)
