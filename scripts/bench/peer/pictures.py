"""From files to model input as the peers do it: Pillow, with decoding at a fraction of the size where that is allowed.

Tensors are f32 [3, height, width], normalised. Sizes of pictures are width, height.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

# Photos of 400 megapixels are meant.
Image.MAX_IMAGE_PIXELS = None

ORIENTATION = 0x0112
PAD_GREY = 114


def open_upright_rgb(path: str) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


@dataclass(frozen=True)
class Opened:
    """A picture, perhaps decoded at a fraction of its size, and the size it has in full, both upright."""

    picture: Image.Image
    full: tuple[int, int]

    def crop(self, box: tuple[float, float, float, float]) -> Image.Image:
        """The whole pixels that `box` (in pixels of the full size) touches."""
        across, down = self.picture.width / self.full[0], self.picture.height / self.full[1]
        return clamped_crop(self.picture, (box[0] * across, box[1] * down, box[2] * across, box[3] * down))


def open_scaled(path: str, wanted: tuple[int, int]) -> Opened:
    """A JPEG decoded at 1/2, 1/4 or 1/8 while it stays at least as large as `wanted` (before orientation)."""
    image = Image.open(path)
    width, height = image.size
    turned = image.getexif().get(ORIENTATION, 1) >= 5
    image.draft("RGB", wanted)
    picture = ImageOps.exif_transpose(image).convert("RGB")
    return Opened(picture, (height, width) if turned else (width, height))


def clamped_crop(image: Image.Image, box: tuple[float, float, float, float]) -> Image.Image:
    """The whole image where less than 2 x 2 pixels would be left."""
    x0, y0 = max(0, math.floor(box[0])), max(0, math.floor(box[1]))
    x1, y1 = min(image.width, math.ceil(box[2])), min(image.height, math.ceil(box[3]))
    return image.crop((x0, y0, x1, y1)) if x1 - x0 >= 2 and y1 - y0 >= 2 else image


class Normalise:
    def __init__(self, mean: list[float], std: list[float]) -> None:
        self.mean_255 = np.array(mean, np.float32) * 255
        self.inverse_std_255 = 1 / (np.array(std, np.float32) * 255)

    def __call__(self, image: Image.Image | np.ndarray) -> np.ndarray:
        values = (np.asarray(image, dtype=np.float32) - self.mean_255) * self.inverse_std_255
        return np.ascontiguousarray(values.transpose(2, 0, 1))


class ShortestThenCrop:
    """Bicubic to a shortest edge, then the centre: what preprocessor_config.json says of DINOv2."""

    def __init__(self, settings: dict) -> None:
        self.shortest = settings["size"]["shortest_edge"]
        self.side = settings["crop_size"]["height"]
        self.input_sides = (self.side, self.side)
        self.normalise = Normalise(settings["image_mean"], settings["image_std"])

    def resized(self, width: int, height: int) -> tuple[int, int]:
        short, long = min(width, height), max(width, height)
        long = int(self.shortest * long / short)
        return (self.shortest, long) if width <= height else (long, self.shortest)

    def tensor(self, image: Image.Image) -> np.ndarray:
        image = image.resize(self.resized(*image.size), Image.Resampling.BICUBIC)
        left, top = (image.width - self.side) // 2, (image.height - self.side) // 2
        return self.normalise(image.crop((left, top, left + self.side, top + self.side)))


class Squash:
    """Bicubic to width x height: what croprow.toml says of EfficientNet-Lite0."""

    def __init__(self, settings: dict) -> None:
        self.size = (settings["width"], settings["height"])
        self.input_sides = self.size[::-1]
        self.normalise = Normalise(settings["mean"], settings["std"])

    def resized(self, _width: int, _height: int) -> tuple[int, int]:
        return self.size

    def tensor(self, image: Image.Image) -> np.ndarray:
        return self.normalise(image.resize(self.size, Image.Resampling.BICUBIC))


def embedding_input(folder: Path) -> ShortestThenCrop | Squash:
    """How the embedder in `folder` wants its crops."""
    own = folder / "croprow.toml"
    if own.is_file():
        return Squash(tomllib.loads(own.read_text())["input"])
    return ShortestThenCrop(json.loads((folder / "preprocessor_config.json").read_text()))


class ShortestWithin:
    """Bilinear to a shortest edge, less where the longest would get too long: GroundingDINO.

    Source: get_size_with_aspect_ratio of transformers.
    """

    def __init__(self, settings: dict) -> None:
        self.shortest, self.longest = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
        self.normalise = Normalise(settings["image_mean"], settings["image_std"])

    def resized(self, width: int, height: int) -> tuple[int, int]:
        short, long = min(width, height), max(width, height)
        exact = float(self.shortest)
        if long / short * self.shortest > self.longest:
            exact = self.longest * short / long
        side = round(exact)
        if short == side:
            return width, height
        return (side, int(exact * height / width)) if width < height else (int(exact * width / height), side)

    def tensor(self, image: Image.Image, full: tuple[int, int]) -> np.ndarray:
        return self.normalise(image.resize(self.resized(*full), Image.Resampling.BILINEAR))


class Letterbox:
    """Bilinear into a grey square: YOLO. Values are 0 to 1."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.normalise = Normalise([0.0] * 3, [1.0] * 3)

    def scale(self, width: int, height: int) -> float:
        return min(self.side / width, self.side / height)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        scale = self.scale(width, height)
        return round(width * scale), round(height * scale)

    def corner(self, full: tuple[int, int]) -> tuple[int, int]:
        width, height = self.resized(*full)
        return round((self.side - width) / 2 - 0.1), round((self.side - height) / 2 - 0.1)

    def tensor(self, image: Image.Image, full: tuple[int, int]) -> np.ndarray:
        canvas = Image.new("RGB", (self.side, self.side), (PAD_GREY,) * 3)
        canvas.paste(image.resize(self.resized(*full), Image.Resampling.BILINEAR), self.corner(full))
        return self.normalise(canvas)

    def to_photo(self, boxes: np.ndarray, full: tuple[int, int]) -> np.ndarray:
        """[n, 4] x0 y0 x1 y1 from input pixels to photo pixels, clipped."""
        boxes = (boxes - np.array(self.corner(full) * 2)) / self.scale(*full)
        return np.clip(boxes, 0, np.array(full * 2))
