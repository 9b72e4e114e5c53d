"""Inputs to ask a GroundingDINO with, and its answers as labels and boxes. Needs no picture: the pixels are a pattern.

A case is a list of sizes (width, height) and as many prompts. Pictures of different size are padded with 0 after
normalising, prompts with token 0, as the Hugging Face processor does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

SHORT = "a cat."
MIDDLE = "a cat. a dog. a remote control."
LONG = (
    "a black cat on a red sofa. a dog. a bicycle wheel. a person with an umbrella. traffic light. a wooden chair. sky."
)

BEST_COUNT = 20


@dataclass
class Case:
    """One batch."""

    name: str
    sizes_px: list[tuple[int, int]]
    prompts: list[str]


@dataclass
class Preparation:
    """What turns pixels and text into the graph's inputs."""

    tokenizer: Tokenizer
    mean: list[float]
    std: list[float]

    @classmethod
    def of_folder(cls, folder: Path) -> Preparation:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer, settings["image_mean"], settings["image_std"])

    def normalised(self, pixels: np.ndarray) -> np.ndarray:
        """u8 [height, width, 3] -> f32 [3, height, width]."""
        mean, std = np.array(self.mean), np.array(self.std)
        return ((pixels / 255 - mean) / std).astype(np.float32).transpose(2, 0, 1)

    def inputs(self, pictures: list[np.ndarray], prompts: list[str]) -> dict[str, np.ndarray]:
        """The graph's five inputs for one batch of u8 pictures."""
        pixel_values, pixel_mask = self._pixels(pictures)
        input_ids, attention_mask = self._tokens(prompts)
        return {
            "pixel_values": pixel_values,
            "input_ids": input_ids,
            "token_type_ids": np.zeros_like(input_ids),
            "attention_mask": attention_mask,
            "pixel_mask": pixel_mask,
        }

    def inputs_of(self, case: Case) -> dict[str, np.ndarray]:
        return self.inputs([pattern(*size) for size in case.sizes_px], case.prompts)

    def _pixels(self, pictures: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        height, width = np.max([picture.shape[:2] for picture in pictures], axis=0)
        values = np.zeros((len(pictures), 3, height, width), np.float32)
        mask = np.zeros((len(pictures), height, width), np.int64)
        for index, picture in enumerate(pictures):
            rows, columns = picture.shape[:2]
            values[index, :, :rows, :columns] = self.normalised(picture)
            mask[index, :rows, :columns] = 1
        return values, mask

    def _tokens(self, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        length = max(map(len, rows))
        ids = np.array([row + [0] * (length - len(row)) for row in rows], np.int64)
        mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], np.int64)
        return ids, mask

    def labels_of_tokens(self, prompt: str) -> list[str | None]:
        """For each token of a prompt its phrase; None for [CLS], [SEP] and the dots.

        "a cat. a dog." -> [None, "a cat", "a cat", None, "a dog", "a dog", None, None]
        """
        encoding = self.tokenizer.encode(prompt)
        labels: list[str | None] = []
        for (start, end), special in zip(encoding.offsets, encoding.special_tokens_mask):
            if special or prompt[start:end] == ".":
                labels.append(None)
            else:
                labels.append(prompt[prompt.rfind(".", 0, start) + 1 :].split(".")[0].strip())
        return labels


def pattern(width_px: int, height_px: int) -> np.ndarray:
    """Squares of 8 pixels in many colours: u8 [height, width, 3]."""
    columns, rows = np.arange(width_px) // 8, np.arange(height_px)[:, None] // 8
    grey = columns * 37 + rows * 61 + columns * rows * 7
    return ((grey[:, :, None] + np.arange(3) * 85) % 256).astype(np.uint8)


def best_detections(logits: np.ndarray, boxes: np.ndarray, labels: list[str | None]) -> list[dict]:
    """The best detections of one picture, best first: each query's best token that belongs to a label."""
    columns = [index for index, label in enumerate(labels) if label is not None]
    scores = 1 / (1 + np.exp(-logits[:, columns].astype(np.float64)))
    token, score = scores.argmax(1), scores.max(1)
    return [
        {
            "label": labels[columns[token[query]]],
            "score": rounded(score[query]),
            "box": [rounded(side) for side in boxes[query]],
        }
        for query in np.argsort(-score, kind="stable")[:BEST_COUNT]
    ]


def rounded(value: float) -> float:
    return float(f"{value:.7g}")
