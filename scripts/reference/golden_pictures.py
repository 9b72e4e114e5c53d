"""The twelve golden pictures, made from photographs that scikit-image and scikit-learn ship.

    .demo/venv-export/bin/pip install -r scripts/reference/requirements-golden.txt
    .demo/venv-export/bin/python scripts/reference/golden_pictures.py OUT_DIR

One of each kind of file that a photo folder holds: EXIF orientations, chroma without subsampling, grey, CMYK, alpha,
palette, progressive, very tall, very wide. Says how far the new ones are from those in tests/data, which stay as they
are: eleven are equal to the byte with Pillow 12.0.0, the progressive one is off by 13 levels at most, 0.25 on average.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import skimage
import sklearn
from PIL import Image

COMMITTED = Path(__file__).resolve().parents[2] / "tests/data/golden/pictures"

SKIMAGE = Path(skimage.__file__).parent / "data"
SKLEARN = Path(sklearn.__file__).parent / "datasets/images"
QUALITY = 90
ORIENTATION = 0x0112
BICUBIC, Transpose = Image.Resampling.BICUBIC, Image.Transpose

NAMES = [
    "00_cat_portrait.jpg",
    "01_rocket_720p.jpg",
    "02_china_640x427.jpg",
    "03_flower_exif6.jpg",
    "04_astronaut_exif8.jpg",
    "05_coffee_exif5_444.jpg",
    "06_grey_camera.jpg",
    "07_cmyk_chelsea.jpg",
    "08_rgba_png.png",
    "09_tall_200x1200.jpg",
    "10_wide_1600x240_prog.jpg",
    "11_pal_png16.png",
]


def photo(name: str) -> Image.Image:
    return Image.open(SKIMAGE / name).convert("RGB")


def save_turned(image: Image.Image, how: Transpose, orientation: int, path: Path, **options) -> None:
    """Stored turned, with the EXIF orientation that turns it back."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image.transpose(how).save(path, quality=QUALITY, exif=exif, **options)


def make_pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in NAMES]
    rocket = photo("rocket.jpg").resize((1280, 720), BICUBIC)

    photo("chelsea.png").resize((810, 1080), BICUBIC).save(files[0], quality=QUALITY)
    rocket.save(files[1], quality=QUALITY)
    shutil.copyfile(SKLEARN / "china.jpg", files[2])
    save_turned(Image.open(SKLEARN / "flower.jpg"), Transpose.ROTATE_90, 6, files[3])
    save_turned(photo("astronaut.png"), Transpose.ROTATE_270, 8, files[4])
    save_turned(photo("coffee.png"), Transpose.TRANSPOSE, 5, files[5], subsampling=0)
    photo("camera.png").convert("L").save(files[6], quality=QUALITY)
    photo("chelsea.png").convert("CMYK").save(files[7], quality=QUALITY)
    Image.open(SKIMAGE / "logo.png").save(files[8])
    tall = Image.open(files[0]).resize((200, 1200), BICUBIC, box=(300, 0, 480, 1080))
    tall.save(files[9], quality=QUALITY)
    wide = rocket.resize((1600, 240), BICUBIC, box=(0, 200, 1280, 392))
    wide.save(files[10], quality=QUALITY, progressive=True)
    palette = photo("rocket.jpg").resize((321, 213)).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    palette.save(files[11])


def compare(folder: Path) -> None:
    for name in NAMES:
        made, there = (np.asarray(Image.open(each / name).convert("RGB")).astype(int) for each in (folder, COMMITTED))
        if made.shape != there.shape:
            print(f"{name:26} {made.shape} against {there.shape}")
            continue
        distance = np.abs(made - there)
        same = (folder / name).read_bytes() == (COMMITTED / name).read_bytes()
        says = "equal" if same else f"off by {distance.max()} levels at most, {distance.mean():.2f} on average"
        print(f"{name:26} {says}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden pictures.")
    parser.add_argument("out_dir", type=Path)
    folder = parser.parse_args().out_dir
    make_pictures(folder)
    compare(folder)


if __name__ == "__main__":
    main()
