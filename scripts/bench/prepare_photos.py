"""The photos of the measurements, made of a few real ones: cut, enlarged, with grain as a camera's, saved as JPEG.

    set         files     rows
    mix         400       400      half 640x480, 35 % 1920x1080, 15 % 4000x3000
    twelve      of mix    as many  those of 12 megapixels
    large       64        64       12 to 24 megapixels
    web         600       600      500x375 to 1024x768
    shapes      500       10,000   500 different sizes of 96 to 640 pixels
    mp24        8         64       24 megapixels
    mp400       1         1        400 megapixels
    video       795       795      the frames of scripts/fetch-demo.sh --video

A third stands upright, 12 % carry an EXIF orientation other than 1 (stored so that turning restores the scene),
quality is 90, a quarter is 4:4:4, a tenth progressive. Each photo has its own seed: the same files whatever the number
of cores.

Writes SET/*.jpg and SET.db with one table: images (id, path, prompt, label).

Example: prepare_photos.py --photos .demo/photos --out .demo/bench/photos mix twelve
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

Image.MAX_IMAGE_PIXELS = None

# Those that are there on every system.
SOURCES = (
    "astronaut.png", "bus.jpg", "chelsea.png", "coffee.png", "motorcycle_left.png", "motorcycle_right.png",
    "rocket.jpg", "zidane.jpg",
)  # fmt: skip
ORIENTATION = 0x0112
# Phones write 6 and 8 most.
ORIENTATIONS = (2, 3, 3, 4, 5, 6, 6, 6, 7, 8, 8)
# How pixels have to be stored for the orientation to restore the scene.
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
PROMPTS = (
    "a person. a bus.",
    "a cat. a dog.",
    "a red car. a traffic light. a bicycle.",
    "a flower.",
    "a building. a tree. a window.",
    "a cup of coffee. a table.",
    "a man wearing a tie.",
    "a helmet. a motorcycle. a wheel. a book shelf.",
)
MIX = (((640, 480), 0.50), ((1920, 1080), 0.35), ((4000, 3000), 0.15))
LARGE = (((4000, 3000), 0.4), ((5184, 3456), 0.3), ((6000, 4000), 0.3))
WEB = (((640, 480), 0.5), ((500, 375), 0.2), ((800, 600), 0.15), ((1024, 768), 0.15))
MP24 = (((6000, 4000), 1.0),)
GRAIN_SIDE_PX = 1024

Size = tuple[int, int]


@dataclass(frozen=True)
class Photo:
    path: Path
    label: str


class Maker:
    """One photo after another; in each process one."""

    def __init__(self, folder: Path) -> None:
        self.sources = [Image.open(folder / name).convert("RGB") for name in SOURCES]
        self.grain = np.random.default_rng(7).normal(0, 1, (GRAIN_SIDE_PX, GRAIN_SIDE_PX)).astype(np.float32)

    def make(self, chance: random.Random, size: Size, path: Path, plain: bool = False) -> None:
        """`plain`: landscape as given, no orientation, baseline."""
        width, height = size if plain or chance.random() >= 0.33 else size[::-1]
        picture = Image.fromarray(self.with_grain(self.scene(chance, width, height), chance))
        orientation = chance.choice(ORIENTATIONS) if not plain and chance.random() < 0.12 else 1
        options = {}
        if orientation != 1:
            picture = picture.transpose(STORED[orientation])
            exif = Image.Exif()
            exif[ORIENTATION] = orientation
            options["exif"] = exif
        picture.save(
            path,
            quality=90,
            subsampling=2 if plain or chance.random() < 0.75 else 0,
            progressive=not plain and chance.random() < 0.10,
            **options,
        )

    def scene(self, chance: random.Random, width: int, height: int) -> Image.Image:
        """A part of one of the real photos."""
        source = chance.choice(self.sources)
        share, aspect = chance.uniform(0.55, 1.0), width / height
        if source.width / source.height < aspect:
            across, down = source.width * share, source.width * share / aspect
        else:
            across, down = source.height * share * aspect, source.height * share
        left, top = chance.uniform(0, source.width - across), chance.uniform(0, source.height - down)
        box = (left, top, left + across, top + down)
        return source.resize((width, height), Image.Resampling.BICUBIC, box=box)

    def with_grain(self, picture: Image.Image, chance: random.Random) -> np.ndarray:
        """Without it an enlarged photo is smooth, and its file a fraction of what a camera's is."""
        strength = chance.uniform(1.5, 4.0)
        pixels = np.asarray(picture)
        grained = np.empty_like(pixels)
        for top in range(0, picture.height, GRAIN_SIDE_PX):
            rows = pixels[top : top + GRAIN_SIDE_PX].astype(np.float32)
            shift = chance.randrange(GRAIN_SIDE_PX)
            repeats = -(-picture.width // GRAIN_SIDE_PX)
            grain = np.tile(np.roll(self.grain, shift, axis=1), (1, repeats))[: rows.shape[0], : picture.width]
            grained[top : top + GRAIN_SIDE_PX] = np.clip(rows + strength * grain[..., None], 0, 255)
        return grained


maker: Maker | None = None


def start_maker(folder: Path) -> None:
    global maker
    maker = Maker(folder)


def make_of_sizes(index: int, name: str, sizes: tuple, plain: bool, folder: Path) -> Photo:
    chance = random.Random(f"{name} {index}")
    size = chance.choices([size for size, _ in sizes], [share for _, share in sizes])[0]
    label = f"{size[0]}x{size[1]}"
    path = folder / f"{index:04d}_{label}.jpg"
    maker.make(chance, size, path, plain)
    return Photo(path, label)


def make_of_its_own_size(index: int, folder: Path) -> Photo:
    """500 sizes, no two alike: widths of 96 to 595 in a shuffled order, and heights that follow the index."""
    chance = random.Random(f"shapes {index}")
    width, height = 96 + (index * 211) % 500, 96 + (index * 7) % 545
    label = f"{width}x{height}"
    path = folder / f"{index:04d}_{label}.jpg"
    maker.make(chance, (width, height), path, plain=True)
    return Photo(path, label)


def make_400_megapixels(_index: int, folder: Path) -> Photo:
    """20,000 x 20,000, smooth: what counts is how much memory it asks for."""
    path = folder / "0000_20000x20000.jpg"
    maker.sources[0].resize((20000, 20000), Image.Resampling.BILINEAR).save(path, quality=75, subsampling=2)
    return Photo(path, "20000x20000")


MADE: dict[str, tuple[int, Callable[..., Photo]]] = {
    "mix": (400, partial(make_of_sizes, name="mix", sizes=MIX, plain=False)),
    "large": (64, partial(make_of_sizes, name="large", sizes=LARGE, plain=False)),
    "web": (600, partial(make_of_sizes, name="web", sizes=WEB, plain=False)),
    "shapes": (500, make_of_its_own_size),
    "mp24": (8, partial(make_of_sizes, name="mp24", sizes=MP24, plain=True)),
    "mp400": (1, make_400_megapixels),
}
ROWS = {"shapes": 10_000, "mp24": 64}


def make_set(name: str, sources: Path, out: Path, cores: int) -> list[Photo]:
    """All files under another name first, so that a set is there whole or not at all."""
    count, make = MADE[name]
    part, folder = out / f"{name}.part", out / name
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool(min(cores, count), start_maker, (sources,)) as pool:
        photos = pool.map(partial(make, folder=part), range(count), chunksize=1)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return [Photo(folder / photo.path.name, photo.label) for photo in photos]


def twelve_megapixels(out: Path) -> list[Photo]:
    return [Photo(path, "4000x3000") for path in sorted((out / "mix").glob("*_4000x3000.jpg"))]


def write_table(path: Path, photos: list[Photo], rows: int) -> None:
    """Rows beyond the photos name them again, in the same order."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, path TEXT NOT NULL, prompt TEXT, label TEXT)")
    chance = random.Random(path.name)
    lines = [
        (index, str(photos[index % len(photos)].path), chance.choice(PROMPTS), photos[index % len(photos)].label)
        for index in range(rows)
    ]
    connection.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", lines)
    connection.commit()
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=[*MADE, "twelve", "video"], metavar="SET")
    parser.add_argument("--photos", type=Path, required=True, help="folder of the real photos")
    parser.add_argument("--video", type=Path, help="folder of the frames")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in arguments.sets:
        if name == "twelve":
            photos = twelve_megapixels(out)
        elif name == "video":
            photos = [Photo(path.resolve(), "768x576") for path in sorted(arguments.video.glob("*.jpg"))]
        else:
            photos = make_set(name, arguments.photos, out, arguments.cores)
        write_table(out / f"{name}.db", photos, ROWS.get(name, len(photos)))
        size_mb = sum(photo.path.stat().st_size for photo in photos) / 1e6
        print(f"  {name}: {len(photos)} photos, {size_mb:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
