"""From image files to model input, done once in plain Python as the reference for croprow's Rust.

Images are PIL images in upright RGB. Tensors are f32 [3, height, width], RGB, made of value / 255.
Rounding is Python's `round` (half to even) wherever the Python libraries copied here use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

# The grey that Ultralytics letterboxes with.
PAD_GREY = 114


def open_upright_rgb(path: Path) -> Image.Image:
    """EXIF orientation applied; transparent pixels over white."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True)
class Letterbox:
    """How a photo lies in the square detector input. Sizes and offsets are input pixels."""

    scale: float
    width: int
    height: int
    left: int
    top: int

    @staticmethod
    def fit(photo_width: int, photo_height: int, side: int) -> "Letterbox":
        """As Ultralytics' LetterBox(auto=False, center=True); the 0.1 puts an odd pixel at the far side."""
        scale = min(side / photo_width, side / photo_height)
        width, height = round(photo_width * scale), round(photo_height * scale)
        return Letterbox(
            scale,
            width,
            height,
            left=round((side - width) / 2 - 0.1),
            top=round((side - height) / 2 - 0.1),
        )

    def boxes_to_photo(self, boxes: np.ndarray) -> np.ndarray:
        """[n, 4] x0 y0 x1 y1 from input pixels to photo pixels, not clipped."""
        return (boxes - np.array([self.left, self.top] * 2)) / self.scale


def letterboxed_tensor(image: Image.Image, side: int) -> tuple[np.ndarray, Letterbox]:
    """Resized bilinearly with antialiasing (Pillow's own), unlike OpenCV's resize in Ultralytics."""
    fit = Letterbox.fit(*image.size, side)
    canvas = Image.new("RGB", (side, side), (PAD_GREY,) * 3)
    canvas.paste(image.resize((fit.width, fit.height), Image.Resampling.BILINEAR), (fit.left, fit.top))
    return unit_tensor(canvas), fit


def squashed_crop(image: Image.Image, box: np.ndarray, width: int, height: int) -> Image.Image:
    """The whole pixels that `box` (photo pixels) touches, stretched to width x height, bicubic."""
    x0, y0 = max(0, math.floor(box[0])), max(0, math.floor(box[1]))
    x1, y1 = min(image.width, math.ceil(box[2])), min(image.height, math.ceil(box[3]))
    return image.crop((x0, y0, x1, y1)).resize((width, height), Image.Resampling.BICUBIC)


def shortest_edge_center_crop(image: Image.Image, shortest_edge: int, crop: int) -> Image.Image:
    """Hugging Face's resize to {"shortest_edge": n} (the long side is cut to an integer), then centre crop."""
    short, long = sorted(image.size)
    long = int(shortest_edge * long / short)
    size = (shortest_edge, long) if image.width <= image.height else (long, shortest_edge)
    resized = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (resized.width - crop) // 2, (resized.height - crop) // 2
    return resized.crop((left, top, left + crop, top + crop))


def unit_tensor(image: Image.Image) -> np.ndarray:
    """f32 [3, height, width], 0 to 1."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255))


def normalised_tensor(image: Image.Image, mean: list[float], std: list[float]) -> np.ndarray:
    """(value / 255 - mean) / std, per channel."""
    per_channel = [np.array(values, dtype=np.float32)[:, None, None] for values in (mean, std)]
    return (unit_tensor(image) - per_channel[0]) / per_channel[1]


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """L2 normalisation along the last axis."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
