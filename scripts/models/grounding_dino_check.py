"""Compares an exported GroundingDINO with PyTorch, case by case.

The encoder keeps the queries with the best scores, in order. Where two scores are closer than rounding noise, two
correct programs may order them differently, and everything behind differs then. So the graph is asked which queries
it kept. If they are not PyTorch's own, their order must be one that PyTorch's scores allow within `TIE_LIMIT`, and
PyTorch is run again with just these queries: then all outputs must be equal again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from grounding_dino_cases import LONG, MIDDLE, SHORT, Case, Preparation

LOGIT_LIMIT = 1e-3
BOX_LIMIT = 1e-4
TIE_LIMIT = 1e-4

CASES = [
    Case("one picture", [(264, 248)], [SHORT]),
    Case("odd sides", [(397, 301)], [MIDDLE]),
    Case("tall, long prompt", [(211, 489)], [LONG]),
    Case("wide", [(640, 224)], [SHORT]),
    Case("coarsest is one wide", [(61, 1000)], [MIDDLE]),
    Case("coarsest is one high", [(1000, 64)], [SHORT]),
    Case("two of one size", [(320, 240)] * 2, [LONG, MIDDLE]),
    Case("two, padded", [(320, 240), (256, 288)], [MIDDLE, SHORT]),
    Case("four, padded", [(300, 400), (397, 301), (320, 320), (251, 333)], [SHORT, LONG, MIDDLE, "a tree. a car."]),
    Case("full size", [(1333, 800)], [MIDDLE]),
]


@dataclass
class Answer:
    """What one program says of one batch."""

    logits: np.ndarray
    boxes: np.ndarray
    queries: np.ndarray  # kept by the encoder: [batch, queries]


class Graph:
    """An exported graph, opened with one more output: the queries that the encoder keeps."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        (top_k,) = [node for node in model.graph.node if node.op_type == "TopK"]
        self.queries_output = top_k.output[1]
        model.graph.output.append(onnx.helper.make_tensor_value_info(self.queries_output, onnx.TensorProto.INT64, None))
        opened = path.with_name("check.onnx")
        onnx.save(model, opened)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(opened, options, providers=["CPUExecutionProvider"])
        finally:
            opened.unlink()

    def run(self, inputs: dict[str, np.ndarray]) -> Answer:
        return Answer(*self.session.run(["logits", "pred_boxes", self.queries_output], inputs))


class Reference:
    """The model in PyTorch, under its default attention."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.scores = torch.empty(0)  # of the encoder's last run: [batch, positions]

    @torch.no_grad()
    def run(self, inputs: dict[str, np.ndarray], queries: np.ndarray | None = None) -> Answer:
        """`queries`: keep these rather than those with the best scores."""
        top_k, kept = torch.topk, []

        def choose(scores: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.scores = scores
            if scores.shape[1] < count:
                raise SystemExit(f"the model keeps {count} queries, this case has only {scores.shape[1]}")
            kept.append(top_k(scores, count, dim=dim)[1] if queries is None else torch.from_numpy(queries))
            return scores.gather(1, kept[0]), kept[0]

        with mock.patch.object(torch, "topk", choose):
            output = self.model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        return Answer(output.logits.numpy(), output.pred_boxes.numpy(), kept[0].numpy())

    def disorder(self, queries: np.ndarray) -> float:
        """By how much the last run's scores contradict that these queries are the best, in this order."""
        worst = 0.0
        for row, chosen in zip(self.scores.numpy(), queries):
            if len(set(chosen)) != len(chosen) or chosen.max() >= len(row):
                return float("inf")
            left_out = np.delete(row, chosen).max(initial=-np.inf)
            later = np.append(row[chosen][1:], left_out)
            best_later = np.maximum.accumulate(later[::-1])[::-1]
            worst = max(worst, float((best_later - row[chosen]).max()))
        return worst

    def least_gap(self, count: int) -> float:
        """The smallest step between neighbours among the last run's `count` best scores and the next one."""
        best = -np.sort(-self.scores.numpy(), axis=1)[:, : count + 1]
        return float((best[:, :-1] - best[:, 1:]).min())


@dataclass
class Difference:
    """The largest differences of one case; `moved` queries were told apart as near ties."""

    logits: float
    boxes: float
    moved: int = 0
    disorder: float = 0.0

    @property
    def acceptable(self) -> bool:
        # NaN is not below a limit.
        return self.logits <= LOGIT_LIMIT and self.boxes <= BOX_LIMIT and self.disorder <= TIE_LIMIT

    def __str__(self) -> str:
        ties = f"; {self.moved} queries ordered otherwise, by {self.disorder:.1e} in score" if self.moved else ""
        return f"logits {self.logits:.1e}, boxes {self.boxes:.1e}{ties}"


def largest(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference where numbers are expected; infinite if infinities are not in the same places."""
    numbers = np.isfinite(expected)
    if found.shape != expected.shape or (np.isfinite(found) != numbers).any():
        return float("inf")
    return float(np.abs(found[numbers] - expected[numbers]).max())


def difference(found: Answer, reference: Reference, inputs: dict[str, np.ndarray]) -> Difference:
    expected = reference.run(inputs)
    moved = int((found.queries != expected.queries).sum())
    disorder = reference.disorder(found.queries) if moved else 0.0
    if moved and disorder <= TIE_LIMIT:
        expected = reference.run(inputs, found.queries)
    return Difference(largest(found.logits, expected.logits), largest(found.boxes, expected.boxes), moved, disorder)


def outcome(graph: Graph, reference: Reference, inputs: dict[str, np.ndarray]) -> tuple[bool, Any]:
    """Whether one case is right, and what to say of it."""
    try:
        found = graph.run(inputs)
    except Exception as error:  # ONNX Runtime's errors have no base class of their own
        return False, f"does not run: {str(error).splitlines()[0][:200]}"
    differs = difference(found, reference, inputs)
    return differs.acceptable, differs


def verify(graph: Graph, reference: Reference, preparation: Preparation) -> int:
    """Prints each case's largest difference; how many cases are wrong."""
    wrong = 0
    for case in CASES:
        inputs = preparation.inputs_of(case)
        right, says = outcome(graph, reference, inputs)
        batch, _, height, width = inputs["pixel_values"].shape
        shape = f"{batch} of {width} x {height}, {inputs['input_ids'].shape[1]} tokens"
        print(f"{'ok   ' if right else 'WRONG'} {case.name:20} {shape:30} {says}", flush=True)
        wrong += not right
    return wrong
