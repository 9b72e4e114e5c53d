"""From photos to the inputs of a Hugging Face graph, with numpy and Pillow only.

Follows `preprocessor_config.json` as transformers does, but resizes uint8 pictures with Pillow in every family: good
enough to calibrate and to compare two graphs with each other, not to the last grey level for OWLv2 and DINOv3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from hf_folder import ExportError, image_settings, mean_and_std, normalised

PHOTO_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
LABELS = ["a person", "a car", "a dog"]
# Families whose processor has no `resample` in its settings, or takes one number for the short side.
BICUBIC, BILINEAR = 3, 2
CONVNEXT_WARPS_FROM_PX = 384


def photos_in(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PHOTO_ENDINGS)
    if not paths:
        raise ExportError(f"{folder} holds no photos")
    return paths


def open_upright_rgb(path: Path) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


class PhotoReader:
    """What the settings beside a graph say of its picture input."""

    def __init__(self, folder: Path) -> None:
        self.settings = image_settings(folder)
        self.mean, self.std = mean_and_std(self.settings)
        kind = self.settings.get("image_processor_type") or self.settings.get("feature_extractor_type") or ""
        self.kind = kind.removesuffix("Fast").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")

    def read(self, path: Path) -> np.ndarray:
        """f32 [3, h, w]."""
        return normalised(np.asarray(self._resized(open_upright_rgb(path))), self.mean, self.std)

    def _resized(self, image: Image.Image) -> Image.Image:
        settings = self.settings
        if self.kind == "Owlv2":
            side = max(image.size)
            square = Image.new("RGB", (side, side))
            square.paste(image)
            image = square
        size = settings.get("size")
        crop = settings.get("crop_size") if settings.get("do_center_crop") else None
        if self.kind == "ConvNext":
            image, crop = self._convnext_resized(image, size)
        else:
            image = image.resize(self._target(image, size, crop is not None), self._filter())
        if crop is None:
            return image
        width, height = (crop["width"], crop["height"]) if isinstance(crop, dict) else (crop, crop)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def _filter(self) -> int:
        return self.settings.get("resample", BICUBIC if self.kind in ("CLIP", "Bit") else BILINEAR)

    def _target(self, image: Image.Image, size: Any, crops: bool) -> tuple[int, int]:
        if isinstance(size, list):
            height, width = size
            return width, height
        if isinstance(size, int):
            if "max_size" in self.settings:
                size = {"shortest_edge": size, "longest_edge": self.settings["max_size"]}
            else:
                size = {"shortest_edge": size} if crops else {"height": size, "width": size}
        if not isinstance(size, dict):
            raise ExportError(f"size is {size} in the image processor's settings")
        if "height" in size:
            return size["width"], size["height"]
        return within_edges(image.size, size["shortest_edge"], size.get("longest_edge"))

    def _convnext_resized(self, image: Image.Image, size: Any) -> tuple[Image.Image, int | None]:
        side = size["shortest_edge"] if isinstance(size, dict) else size
        if side >= CONVNEXT_WARPS_FROM_PX:
            return image.resize((side, side), self._filter()), None
        short = int(side / self.settings.get("crop_pct", 0.875))
        return image.resize(within_edges(image.size, short, None), self._filter()), side


def within_edges(size: tuple[int, int], shortest: int, longest: int | None) -> tuple[int, int]:
    """width, height with the short side of `shortest`, or less where the long side would pass `longest`.

    >>> within_edges((640, 427), 800, 1333)
    (1199, 800)
    """
    width, height = size
    short, long = min(size), max(size)
    side, exact = shortest, float(shortest)
    if longest and long / short * shortest > longest:
        exact = longest * short / long
        side = round(exact)
    other = int(exact * long / short)
    return (side, other) if width <= height else (other, side)


class Feeder:
    """All inputs of a graph."""

    def __init__(self, folder: Path, inputs: list[Any]) -> None:
        self.reader = PhotoReader(folder)
        self.shapes = {graph_input.name: graph_input.shape for graph_input in inputs}
        self.pixels = next((name for name, shape in self.shapes.items() if len(shape) == 4), None)
        if self.pixels is None:
            raise ExportError(f"no input takes pictures; there are {', '.join(self.shapes)}")
        self.text = self._text(folder) if "input_ids" in self.shapes else {}

    def feed(self, tensors: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Pictures of one size."""
        batch = np.stack(tensors)
        feed = {self.pixels: batch}
        if "pixel_mask" in self.shapes:
            # Some published DETR graphs want a mask of 64 x 64 for pictures of any size.
            wanted = zip(self.shapes["pixel_mask"][1:], batch.shape[2:])
            sides = [side if isinstance(side, int) else actual for side, actual in wanted]
            feed["pixel_mask"] = np.ones((len(batch), *sides), np.int64)
        for name, one in self.text.items():
            feed[name] = np.concatenate([one] * len(batch))
        unknown = self.shapes.keys() - feed.keys()
        if unknown:
            raise ExportError(f"nothing is known of the inputs {', '.join(sorted(unknown))}")
        return feed

    def _text(self, folder: Path) -> dict[str, np.ndarray]:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ExportError("the graph takes text: pip install tokenizers") from None
        if not (folder / "tokenizer.json").is_file():
            raise ExportError(f"the graph takes text, and {folder} holds no tokenizer.json")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # BERT's inputs: one text of all labels. CLIP's: a text for each.
        texts = [". ".join(LABELS) + "."] if "token_type_ids" in self.shapes else LABELS
        ids = [tokenizer.encode(text).ids for text in texts]
        length = self.shapes["input_ids"][1]
        length = length if isinstance(length, int) else max(map(len, ids))
        rows = np.zeros((len(ids), length), np.int64)
        mask = np.zeros_like(rows)
        for row, row_mask, text in zip(rows, mask, ids):
            row[: len(text)], row_mask[: len(text)] = text, 1
        all_of = {"input_ids": rows, "attention_mask": mask, "token_type_ids": np.zeros_like(rows)}
        return {name: value for name, value in all_of.items() if name in self.shapes}
