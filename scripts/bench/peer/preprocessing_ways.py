"""Ways from a JPEG to an embedder's input (shortest 256, bicubic, centre crop 224) that Python offers.

A way is a function from a path to f32 [3, 224, 224]. `hugging_face` is the reference: the others differ from it by what
cosine_of_ways.py says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from pictures import ORIENTATION, ShortestThenCrop

Way = Callable[[str], np.ndarray]

# How pixels that are stored for an orientation become upright.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels),
}


def orientation_of(path: str) -> int:
    return Image.open(path).getexif().get(ORIENTATION, 1)


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    return UPRIGHT[orientation](pixels) if orientation in UPRIGHT else pixels


class Rule(ShortestThenCrop):
    def centre(self, pixels: np.ndarray) -> np.ndarray:
        """The middle of upright u8 [height, width, 3], normalised."""
        top, left = (pixels.shape[0] - self.side) // 2, (pixels.shape[1] - self.side) // 2
        return self.normalise(pixels[top : top + self.side, left : left + self.side])


def pillow(rule: Rule) -> Way:
    return lambda path: rule.tensor(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))


def pillow_draft(rule: Rule) -> Way:
    def prepare(path: str) -> np.ndarray:
        image = Image.open(path)
        image.draft("RGB", rule.resized(*image.size))
        return rule.tensor(ImageOps.exif_transpose(image).convert("RGB"))

    return prepare


def pillow_draft_gap(rule: Rule) -> Way:
    """Resized before it is turned, and with Pillow's `reducing_gap`."""

    def prepare(path: str) -> np.ndarray:
        image = Image.open(path)
        orientation, size = image.getexif().get(ORIENTATION, 1), rule.resized(*image.size)
        image.draft("RGB", size)
        image = image.convert("RGB").resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
        return rule.centre(upright(np.asarray(image), orientation))

    return prepare


def opencv(rule: Rule, reduced: bool = False) -> Way:
    import cv2

    cv2.setNumThreads(1)
    fractions = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}

    def prepare(path: str) -> np.ndarray:
        flag = cv2.IMREAD_COLOR
        if reduced:
            short = min(Image.open(path).size)
            flag = next((fractions[by] for by in fractions if short // by >= rule.shortest), cv2.IMREAD_COLOR)
        pixels = cv2.imread(path, flag)
        size = rule.resized(pixels.shape[1], pixels.shape[0])
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        return rule.centre(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))

    return prepare


def torchvision(rule: Rule) -> Way:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)
    mean, std = rule.normalise.mean_255.tolist(), (1 / rule.normalise.inverse_std_255).tolist()

    def prepare(path: str) -> np.ndarray:
        pixels = decode_jpeg(read_file(path), mode=ImageReadMode.RGB, apply_exif_orientation=True)
        width, height = rule.resized(pixels.shape[2], pixels.shape[1])
        bicubic = functional.InterpolationMode.BICUBIC
        pixels = functional.resize(pixels, [height, width], interpolation=bicubic, antialias=True)
        pixels = functional.center_crop(pixels, [rule.side, rule.side])
        return functional.normalize(pixels.float(), mean, std).numpy()

    return prepare


def turbojpeg(rule: Rule, scaled: bool = True, fast: bool = False) -> Way:
    from turbojpeg import TJFLAG_FASTDCT, TJFLAG_FASTUPSAMPLE, TJPF_RGB, TurboJPEG

    library = TurboJPEG(os_library())
    flags = TJFLAG_FASTDCT | TJFLAG_FASTUPSAMPLE if fast else 0

    def prepare(path: str) -> np.ndarray:
        data = Path(path).read_bytes()
        width, height, _, _ = library.decode_header(data)
        divisor = next((by for by in (8, 4, 2) if scaled and min(width, height) / by >= rule.shortest), None)
        factor = (1, divisor) if divisor else None
        pixels = library.decode(data, pixel_format=TJPF_RGB, scaling_factor=factor, flags=flags)
        size = rule.resized(width, height)
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        return rule.centre(upright(pixels, orientation_of(path)))

    return prepare


def os_library() -> str | None:
    """The library that prepare.sh unpacked; without one, the system's."""
    unpacked = Path(__file__).resolve().parents[3] / ".demo/bench/lib/libturbojpeg.so.0"
    return str(unpacked) if unpacked.exists() else None


def hugging_face(processor: Path) -> Way:
    import torch

    from hugging_face import AutoImageProcessor

    torch.set_num_threads(1)
    process = AutoImageProcessor.from_pretrained(processor)

    def prepare(path: str) -> np.ndarray:
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        return process(images=image, return_tensors="pt")["pixel_values"][0].numpy()

    return prepare


WAYS: dict[str, Callable[[Rule], Way]] = {
    "pillow": pillow,
    "pillow_draft": pillow_draft,
    "pillow_draft_gap": pillow_draft_gap,
    "opencv": opencv,
    "opencv_reduced": lambda rule: opencv(rule, reduced=True),
    "torchvision": torchvision,
    "turbojpeg": lambda rule: turbojpeg(rule, scaled=False),
    "turbojpeg_scaled": turbojpeg,
    "turbojpeg_scaled_fast": lambda rule: turbojpeg(rule, fast=True),
}
REFERENCE = "hugging_face"
WAYS[REFERENCE] = lambda _rule: None


def open_way(name: str, processor: Path) -> Way:
    if name == REFERENCE:
        return hugging_face(processor)
    return WAYS[name](Rule(json.loads((processor / "preprocessor_config.json").read_text())))
