"""From a YOLO model's raw output to detections: the reference for croprow's adapter.

Raw rows hold boxes in input pixels. `Detections` holds x0 y0 x1 y1, in the pixels its maker says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Detections:
    """boxes [n, 4] x0 y0 x1 y1; scores [n], 0 to 1; classes [n]."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray

    def take(self, which: np.ndarray | list[int]) -> "Detections":
        return Detections(self.boxes[which], self.scores[which], self.classes[which])

    def __len__(self) -> int:
        return len(self.scores)


def corners(centre_boxes: np.ndarray) -> np.ndarray:
    """[n, 4] cx cy w h to x0 y0 x1 y1."""
    half = centre_boxes[:, 2:] / 2
    return np.concatenate([centre_boxes[:, :2] - half, centre_boxes[:, :2] + half], axis=1)


def decode_v8(output: np.ndarray) -> Detections:
    """[4 + classes, anchors]: each anchor counts under its best class."""
    class_scores = output[4:].T
    return Detections(corners(output[:4].T), class_scores.max(axis=1), class_scores.argmax(axis=1))


def decode_v5(output: np.ndarray) -> Detections:
    """[anchors, 5 + classes]: objectness x class score."""
    class_scores = output[:, 4:5] * output[:, 5:]
    return Detections(corners(output[:, :4]), class_scores.max(axis=1), class_scores.argmax(axis=1))


def decode_end2end(output: np.ndarray) -> Detections:
    """[n, 6] x0 y0 x1 y1 score class: suppressed already, unused rows have score 0."""
    return Detections(output[:, :4], output[:, 4], output[:, 5].astype(np.int64))


def above(found: Detections, threshold: float) -> Detections:
    return found.take(np.flatnonzero(found.scores > threshold))


def clipped(found: Detections, width: int, height: int) -> Detections:
    limits = np.array([width, height, width, height])
    return Detections(np.clip(found.boxes, 0, limits), found.scores, found.classes)


def intersection_over_union(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[4] against [n, 4]."""
    overlap = np.clip(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]), 0, None).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1)
    return overlap / ((box[2:] - box[:2]).prod() + areas - overlap)


def suppressed(found: Detections, iou_limit: float) -> Detections:
    """Greedy, per class, best score first (ties: earlier row first); the result is in that order too."""
    queue = np.argsort(-found.scores, kind="stable")
    kept: list[int] = []
    while len(queue):
        best, queue = int(queue[0]), queue[1:]
        kept.append(best)
        overlap = intersection_over_union(found.boxes[best], found.boxes[queue])
        same_class = found.classes[queue] == found.classes[best]
        queue = queue[~(same_class & (overlap > iou_limit))]
    return found.take(kept)
