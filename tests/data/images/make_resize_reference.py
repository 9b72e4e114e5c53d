#!/usr/bin/env python3
"""Writes resize_reference.jsonl: what Pillow makes of a formula-made picture, for tests/pixels.rs.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install pillow==12.2.0 && /tmp/v/bin/python make_resize_reference.py

Pillow up to 12 goes across first and then down. Pillow 13 goes down first where the height shrinks and the width
hardly does; with sharp filters that differs by several grey levels, so the version matters.

`squash` is `Image.resize`; `pad` follows Ultralytics' `LetterBox`; `center` follows Hugging Face's
`get_resize_output_image_size(default_to_square=False)` and `center_crop`. Pixels are hex, RGB, row by row.
"""
import json
import pathlib

import PIL
from PIL import Image

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos3": Image.Resampling.LANCZOS,
}
FILL = 114


def level(x, y, c):
    """A gradient of its own in each channel, with noise and hard edges."""
    noise = ((x * 374761393 + y * 668265263 + c * 974711) & 0xFFFFFFFF) * 1274126177 & 0xFFFFFFFF
    edge = 90 if (x // 11 + y // 7) % 2 else 0
    return ((3 + 2 * c) * x + (5 - c) * y + edge + (noise >> 26)) % 256


def picture(w, h):
    image = Image.new("RGB", (w, h))
    image.putdata([tuple(level(x, y, c) for c in range(3)) for y in range(h) for x in range(w)])
    return image


def pad(image, size, flt):
    (w, h), (width, height) = image.size, size
    r = min(height / h, width / w)
    new = max(1, round(w * r)), max(1, round(h * r))
    left, top = round((width - new[0]) / 2 - 0.1), round((height - new[1]) / 2 - 0.1)
    canvas = Image.new("RGB", size, (FILL,) * 3)
    canvas.paste(image.resize(new, flt), (left, top))
    return canvas


def center(image, size, shortest, flt):
    short, long = sorted(image.size)
    new_long = int(shortest * long / short)
    new = (shortest, new_long) if image.width <= image.height else (new_long, shortest)
    left, top = (new[0] - size[0]) // 2, (new[1] - size[1]) // 2
    # Outside of the picture `crop` gives black, as `center_crop` does.
    return image.resize(new, flt).crop((left, top, left + size[0], top + size[1]))


CASES = [
    # source size, region, input size, shortest side for `center`
    ((200, 150), (0, 0, 200, 150), (16, 12), 14),
    ((13, 9), (0, 0, 13, 9), (20, 16), 18),
    ((120, 160), (31, 20, 104, 141), (15, 15), 17),
    ((60, 45), (10, 5, 31, 45), (20, 16), 18),
]

out = []
for source, region, size, shortest in CASES:
    image = picture(*source).crop(region)
    for name, flt in FILTERS.items():
        for fit, result in [
            ("squash", image.resize(size, flt)),
            ("pad", pad(image, size, flt)),
            ("center", center(image, size, shortest, flt)),
        ]:
            if name == "nearest" and fit == "center":
                continue  # A place exactly between two pixels falls to either, depending on rounding errors.
            out.append({"source": source, "region": region, "size": size, "shortest": shortest, "filter": name,
                        "fit": fit, "pixels": result.tobytes().hex()})

text = "\n".join(json.dumps(case, separators=(",", ":")) for case in out)
here = pathlib.Path(__file__).parent
(here / "resize_reference.jsonl").write_text(text + "\n")
print(f"Pillow {PIL.__version__}: {len(out)} cases, {len(text)} bytes")
