"""Pruning of ONNX graphs: hidden channels of MLPs, which makes matrices smaller, or single weights, which does not."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

ELEMENTWISE = {"Add", "Mul", "Div", "Sub", "Erf", "Gelu", "Relu", "Sigmoid", "Tanh", "Pow", "Sqrt", "Clip", "Cast"}
WEIGHTED = {"MatMul", "Gemm", "Conv"}
# Kernels are fastest with widths that are multiples of this.
WIDTH_STEP = 8


@dataclass
class Mlp:
    """`second` multiplies by [hidden, out] what `firsts` made with [in, hidden], and elementwise steps between."""

    second: onnx.NodeProto
    firsts: list[onnx.NodeProto] = field(default_factory=list)
    # Biases and scales [hidden] between them: the node and which of its inputs.
    vectors: list[tuple[onnx.NodeProto, int]] = field(default_factory=list)


class Graph:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        graph = model.graph
        self.makers = {output: node for node in graph.node for output in node.output}
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.uses: dict[str, int] = {output.name: 1 for output in graph.output}
        for node in graph.node:
            for name in node.input:
                self.uses[name] = self.uses.get(name, 0) + 1

    def array(self, name: str) -> np.ndarray | None:
        """A constant, wherever it is kept."""
        if name in self.initializers:
            return numpy_helper.to_array(self.initializers[name])
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant" and maker.attribute[0].name == "value":
            return numpy_helper.to_array(maker.attribute[0].t)
        if maker is not None and maker.op_type == "Identity":
            return self.array(maker.input[0])
        return None

    def replace(self, name: str, array: np.ndarray) -> None:
        self.initializers[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))

    def mlps(self) -> list[Mlp]:
        found = (self._mlp_ending_in(node) for node in self.model.graph.node if node.op_type == "MatMul")
        return [mlp for mlp in found if mlp]

    def _matrix(self, node: onnx.NodeProto) -> np.ndarray | None:
        if node.input[1] not in self.initializers or self.uses[node.input[1]] > 1:
            return None
        array = self.array(node.input[1])
        return array if array.ndim == 2 else None

    def _mlp_ending_in(self, second: onnx.NodeProto) -> Mlp | None:
        matrix = self._matrix(second)
        if matrix is None:
            return None
        mlp, hidden = Mlp(second), matrix.shape[0]
        inner_uses: dict[str, int] = {second.input[0]: 1}
        waiting, seen = [second.input[0]], set()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            node = self.makers.get(value)
            if node is None:
                return None
            if node.op_type == "MatMul":
                first = self._matrix(node)
                if first is None or first.shape[1] != hidden:
                    return None
                mlp.firsts.append(node)
                continue
            if node.op_type not in ELEMENTWISE:
                return None
            for i, name in enumerate(node.input):
                constant = self.array(name)
                if constant is None:
                    inner_uses[name] = inner_uses.get(name, 0) + 1
                    waiting.append(name)
                elif constant.size == hidden and constant.shape[-1:] == (hidden,):
                    mlp.vectors.append((node, i))
                elif constant.size != 1:
                    return None
        # A value that is used elsewhere too must keep its width.
        if any(self.uses[name] != count for name, count in inner_uses.items()):
            return None
        return mlp if mlp.firsts else None


def prune_mlps(model: onnx.ModelProto, amount: float) -> list[tuple[int, int]]:
    """Takes the weakest share of hidden channels out of each MLP; gives widths before and after.

    A channel's strength is the norm of what goes into it times the norm of what comes out of it.
    """
    graph = Graph(model)
    widths = []
    for mlp in graph.mlps():
        second = graph.array(mlp.second.input[1])
        strength = np.linalg.norm(second, axis=1)
        for first in mlp.firsts:
            strength = strength * np.linalg.norm(graph.array(first.input[1]), axis=0)
        hidden = len(strength)
        kept_count = max(WIDTH_STEP, round(hidden * (1 - amount) / WIDTH_STEP) * WIDTH_STEP)
        if kept_count >= hidden:
            continue
        kept = np.sort(np.argsort(-strength, kind="stable")[:kept_count])
        graph.replace(mlp.second.input[1], second[kept])
        for first in mlp.firsts:
            graph.replace(first.input[1], graph.array(first.input[1])[:, kept])
        for node, i in mlp.vectors:
            # Exporters let layers with equal biases share them: each gets its own.
            name = f"{mlp.second.input[1]}_{len(model.graph.initializer)}"
            narrowed = np.ascontiguousarray(graph.array(node.input[i])[..., kept])
            model.graph.initializer.append(numpy_helper.from_array(narrowed, name))
            node.input[i] = name
        widths.append((hidden, kept_count))
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name not in used]:
        model.graph.initializer.remove(tensor)
    # Shapes noted inside the graph are those of before.
    del model.graph.value_info[:]
    return widths


def prune_weights(model: onnx.ModelProto, amount: float) -> float:
    """Sets the smallest share of each weight matrix to 0; gives the share of zeros among all parameters."""
    graph = Graph(model)
    zeros = total = 0
    weights = {node.input[1] for node in model.graph.node if node.op_type in WEIGHTED and len(node.input) > 1}
    for name, tensor in graph.initializers.items():
        total += int(np.prod(tensor.dims))
        array = graph.array(name)
        if name not in weights or array.ndim < 2 or array.dtype != np.float32:
            continue
        count = int(array.size * amount)
        if count == 0:
            continue
        limit = np.partition(np.abs(array).ravel(), count - 1)[count - 1]
        array = np.where(np.abs(array) <= limit, np.float32(0), array)
        zeros += int((array == 0).sum())
        graph.replace(name, array)
    return zeros / max(total, 1)
