"""Small JPEGs of every kind of sampling, and what Pillow makes of them at 1/2, 1/4 and 1/8 of their size.

    .demo/venv-export/bin/python scripts/reference/scaled_jpeg.py

Writes tests/data/reference/scaled: NAME.jpg and NAME_DENOMINATOR.png, the pixels of `Image.draft`, which decodes at
the scale of libjpeg's `scale_denom`. The sides are no multiples of any MCU, so that the last column and row are parts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/data/reference/scaled"
PHOTO = ROOT / "tests/data/golden/pictures/02_china_640x427.jpg"
WIDTH, HEIGHT = 141, 99
# Pillow's `subsampling`: 0 is 4:4:4, 1 is 4:2:2, 2 is 4:2:0.
KINDS = {
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "420": {"subsampling": 2},
    "420_progressive": {"subsampling": 2, "progressive": True},
    "444_progressive": {"subsampling": 0, "progressive": True},
    "grey": {},
}


def picture() -> Image.Image:
    """A piece of a photo with saturated stripes in it: colours that differ within a block."""
    pixels = np.asarray(Image.open(PHOTO).convert("RGB").crop((200, 150, 200 + WIDTH, 150 + HEIGHT))).copy()
    for x in range(0, WIDTH, 7):
        pixels[HEIGHT // 2 :, x : x + 2] = [(255, 0, 0), (0, 255, 0), (0, 0, 255)][x // 7 % 3]
    return Image.fromarray(pixels)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, options in KINDS.items():
        path = OUT / f"{name}.jpg"
        image = picture().convert("L") if name == "grey" else picture()
        image.save(path, quality=90, **options)
        for denominator in (2, 4, 8):
            scaled = Image.open(path)
            # The scale is the largest at which the picture is not smaller than this.
            scaled.draft(None, (WIDTH // denominator, HEIGHT // denominator))
            assert scaled.size == (-(-WIDTH // denominator), -(-HEIGHT // denominator)), scaled.size
            scaled.convert("RGB").save(OUT / f"{name}_{denominator}.png", optimize=True)


if __name__ == "__main__":
    main()
