"""What the work must cost at least: CPU seconds per image of decoding, resizing and model calls, and of nothing else.

Models get prepared tensors of the shapes that the photos have, in batches of one shape, with threads that do not spin.
Decoding (at the fraction that the first model allows) and resizing (to what the models take, before normalising) are
Pillow's, in one thread, with the files in memory. Regions are those that croprow found, from its database.

Prints one JSON line: decode_cpu_s_per_image, resize_cpu_s_per_image, detect_cpu_s_per_image, embed_cpu_s_per_image.

Example: floor.py --photos mix.db --limit 16 --embedder dinov2-onnx --regions croprow.db
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from graphs import Detector, Embedder, open_detector
from photo_list import Row, rows
from pictures import open_scaled


Box = tuple[float, float, float, float]


def regions_of(database: Path) -> dict[int, list[Box]]:
    """By the photo's id, which is croprow's key."""
    query = (
        "SELECT CAST(images.key AS INTEGER), x0, y0, x1, y1 FROM regions JOIN images ON images.id = regions.image_id"
    )
    found: dict[int, list[Box]] = defaultdict(list)
    for photo, *box in sqlite3.connect(database).execute(query):
        found[photo].append(tuple(box))
    return found


class Floor:
    def __init__(self, arguments: argparse.Namespace) -> None:
        threads = arguments.threads
        self.detector = open_detector(arguments.detector, threads, spinning=False) if arguments.detector else None
        self.embedder = Embedder(arguments.embedder, threads, spinning=False)
        self.regions = regions_of(arguments.regions)
        self.region_count = 0
        self.batch = arguments.batch
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.prompt = ""
        self.decode_s = self.resize_s = 0.0

    def pixels(self, row: Row) -> None:
        """Adds the costs of decoding and resizing; notes the shape."""
        self.prompt = row.prompt
        with Image.open(row.path) as header:
            size = header.size
        began = time.process_time()
        opened = open_scaled(row.path, (self.detector or self.embedder).input.resized(*size))
        opened.picture.load()
        decoded = time.process_time()
        if self.detector:
            opened.picture.resize(self.detector.input.resized(*opened.full), Image.Resampling.BILINEAR)
        for box in self.regions[row.id]:
            crop = opened.crop(box)
            crop.resize(self.embedder.input.resized(*crop.size), Image.Resampling.BICUBIC)
        self.resize_s += time.process_time() - decoded
        self.decode_s += decoded - began
        self.region_count += len(self.regions[row.id])
        if self.detector:
            self.shapes[self.detector.input.tensor(opened.picture, opened.full).shape] += 1

    def detections_s(self) -> float:
        return sum(self._detections_s(self.detector, shape, count) for shape, count in self.shapes.items())

    def _detections_s(self, detector: Detector, shape: tuple[int, ...], count: int) -> float:
        names = [output.name for output in detector.session.get_outputs()]
        spent_s = 0.0
        for size in batches(count, self.batch):
            pixels = np.random.default_rng(1).normal(0, 1, (size, *shape)).astype(np.float32)
            feed, _ = detector.feed(pixels, [self.prompt] * size)
            if not spent_s:
                detector.session.run(names, feed)
            began = time.process_time()
            detector.session.run(names, feed)
            spent_s += time.process_time() - began
        return spent_s

    def embeddings_s(self) -> float:
        height, width = self.embedder.input.input_sides
        spent_s = 0.0
        for size in batches(self.region_count, self.batch):
            pixels = np.random.default_rng(1).normal(0, 1, (size, 3, height, width)).astype(np.float32)
            if not spent_s:
                self.embedder.vectors(pixels)
            began = time.process_time()
            self.embedder.vectors(pixels)
            spent_s += time.process_time() - began
        return spent_s


def batches(count: int, most: int) -> list[int]:
    return [min(most, count - start) for start in range(0, count, most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="SQLite file of a set, table images")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--detector", type=Path)
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--regions", type=Path, required=True, help="croprow's database over the same photos")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    floor = Floor(arguments)
    todo = list(rows(arguments.photos, arguments.limit))
    for row in todo:
        Path(row.path).read_bytes()
        floor.pixels(row)
    images = len(todo)
    costs = {"decode": floor.decode_s, "resize": floor.resize_s, "embed": floor.embeddings_s()}
    if floor.detector:
        costs["detect"] = floor.detections_s()
    line = {f"{stage}_cpu_s_per_image": round(spent_s / images, 6) for stage, spent_s in costs.items()}
    print(json.dumps({"images": images} | line))


if __name__ == "__main__":
    main()
