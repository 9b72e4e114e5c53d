#!/usr/bin/env python3
"""Writes the pictures that the `image` crate cannot write. Pillow 12.

Those of 40 by 24 hold one gradient, (6 x, 10 y, 128).
"""
import pathlib

from PIL import Image

HERE = pathlib.Path(__file__).parent
image = Image.new("RGB", (40, 24))
image.putdata([(6 * x, 10 * y, 128) for y in range(24) for x in range(40)])
image.convert("CMYK").save(HERE / "cmyk.jpg", quality=95, subsampling=0)
image.save(HERE / "progressive.jpg", quality=95, progressive=True)
image.save(HERE / "lossy.webp", quality=95)
red, blue = Image.new("RGB", (20, 10), (255, 0, 0)), Image.new("RGB", (20, 10), (0, 0, 255))
red.save(HERE / "animated.webp", save_all=True, append_images=[blue], duration=100, lossless=True)
