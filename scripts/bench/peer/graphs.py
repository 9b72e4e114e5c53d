"""The same ONNX files that croprow runs, through onnxruntime's Python package."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from arguments import BOX_THRESHOLD, TEXT_THRESHOLD
from pictures import Letterbox, Opened, ShortestWithin, embedding_input
from results import Region, whole

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reference"))
from detections import above, decode_v8, suppressed  # noqa: E402

IOU_LIMIT = 0.45


def open_session(path: Path, threads: int, spinning: bool = True) -> onnxruntime.InferenceSession:
    """`spinning`: whether threads burn CPU while they wait for work, which is onnxruntime's default."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Embedder:
    def __init__(self, folder: Path, threads: int, spinning: bool = True) -> None:
        self.session = open_session(folder / "model.onnx", threads, spinning)
        self.input = embedding_input(folder)
        self.input_name = self.session.get_inputs()[0].name
        names = [output.name for output in self.session.get_outputs()]
        self.output = next((name for name in ("last_hidden_state", "embedding") if name in names), names[0])

    def vectors(self, pixels: np.ndarray) -> np.ndarray:
        """[n, 3, h, w] to [n, dim]; of tokens the first."""
        output = self.session.run([self.output], {self.input_name: pixels})[0]
        return output[:, 0] if output.ndim == 3 else output


class Detector(Protocol):
    session: onnxruntime.InferenceSession
    input: ShortestWithin | Letterbox

    def detect(self, pixels: np.ndarray, sizes: list[tuple[int, int]], prompts: list[str]) -> list[list[Region]]:
        """[n, 3, h, w] of photos whose upright sizes are `sizes`."""


class GroundingDino:
    """Keeps the best box of a photo, else the whole of it."""

    def __init__(self, folder: Path, threads: int, spinning: bool = True) -> None:
        self.session = open_session(folder / "model.onnx", threads, spinning)
        self.input = ShortestWithin(json.loads((folder / "preprocessor_config.json").read_text()))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def feed(self, pixels: np.ndarray, prompts: list[str]) -> tuple[dict[str, np.ndarray], list]:
        encoded = [self.tokenizer.encode(prompt.strip().lower()) for prompt in prompts]
        ids = np.zeros((len(prompts), max(len(each.ids) for each in encoded)), np.int64)
        attention = np.zeros_like(ids)
        for row, each in enumerate(encoded):
            ids[row, : len(each.ids)] = each.ids
            attention[row, : len(each.ids)] = 1
        mask = np.ones((len(pixels), *pixels.shape[2:]), np.int64)
        feed = {"pixel_values": pixels, "input_ids": ids, "token_type_ids": np.zeros_like(ids)}
        return feed | {"attention_mask": attention, "pixel_mask": mask}, encoded

    def detect(self, pixels: np.ndarray, sizes: list[tuple[int, int]], prompts: list[str]) -> list[list[Region]]:
        feed, encoded = self.feed(pixels, prompts)
        logits, boxes = self.session.run(["logits", "pred_boxes"], feed)
        parts = zip(logits, boxes, encoded, sizes)
        return [[self._best(*part, tokens=feed["input_ids"].shape[1])] for part in parts]

    def _best(self, logits: np.ndarray, boxes: np.ndarray, encoded, size: tuple[int, int], tokens: int) -> Region:
        scores = 1 / (1 + np.exp(-logits[:, :tokens]))
        best = int(scores.max(axis=1).argmax())
        score = float(scores[best].max())
        if score <= BOX_THRESHOLD:
            return whole(*size)
        centre_x, centre_y, width, height = boxes[best].tolist()
        box = (centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2)
        above_threshold = np.flatnonzero(scores[best] > TEXT_THRESHOLD)
        ids = [encoded.ids[token] for token in above_threshold if 0 < token < len(encoded.ids)]
        label = self.tokenizer.decode(ids, skip_special_tokens=False)
        return Region(score, tuple(edge * side for edge, side in zip(box, size * 2)), label)


class Yolo:
    """Keeps all boxes that suppression leaves; a photo may have none."""

    def __init__(self, folder: Path, threads: int, spinning: bool = True) -> None:
        self.session = open_session(folder / "model.onnx", threads, spinning)
        self.input = Letterbox(self.session.get_inputs()[0].shape[2])
        self.names: dict[int, str] = ast.literal_eval(self.session.get_modelmeta().custom_metadata_map["names"])

    def feed(self, pixels: np.ndarray, _prompts: list[str]) -> tuple[dict[str, np.ndarray], list]:
        return {"images": pixels}, []

    def detect(self, pixels: np.ndarray, sizes: list[tuple[int, int]], _prompts: list[str]) -> list[list[Region]]:
        outputs = self.session.run(["output0"], {"images": pixels})[0]
        return [self._regions(output, size) for output, size in zip(outputs, sizes)]

    def _regions(self, output: np.ndarray, size: tuple[int, int]) -> list[Region]:
        found = suppressed(above(decode_v8(output), BOX_THRESHOLD), IOU_LIMIT)
        boxes = self.input.to_photo(found.boxes.astype(np.float64), size).tolist()
        parts = zip(found.scores.tolist(), boxes, found.classes.tolist())
        return [Region(score, tuple(box), self.names[index]) for score, box, index in parts]


def open_detector(folder: Path, threads: int, spinning: bool = True) -> GroundingDino | Yolo:
    kind = GroundingDino if (folder / "tokenizer.json").is_file() else Yolo
    return kind(folder, threads, spinning)


def detector_tensor(detector: Detector, opened: Opened) -> np.ndarray:
    return detector.input.tensor(opened.picture, opened.full)
