"""What the work must cost at least: CPU seconds per image of decoding, resizing and model calls, and of nothing else.

Models get prepared tensors of the shapes that the photos have, in batches of one shape, with threads that do not spin.
Decoding (at the fraction that the first model allows) and resizing are Pillow's, one thread, the files in memory.

Prints one JSON line: decode_cpu_s_per_image, resize_cpu_s_per_image, detect_cpu_s_per_image, embed_cpu_s_per_image.

Example: floor.py --photos mix.db --limit 16 --embedder dinov2-onnx --regions-per-image 1
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from graphs import Detector, Embedder, detector_tensor, open_detector
from photo_list import Row, rows
from pictures import open_scaled


class Floor:
    def __init__(self, arguments: argparse.Namespace) -> None:
        threads = arguments.threads
        self.detector = open_detector(arguments.detector, threads, spinning=False) if arguments.detector else None
        self.embedder = Embedder(arguments.embedder, threads, spinning=False)
        self.regions_per_image = arguments.regions_per_image
        self.batch = arguments.batch
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.prompt = ""
        self.decode_s = self.resize_s = 0.0

    def pixels(self, todo: list[Row]) -> None:
        """Costs of decoding and resizing; notes the shapes."""
        for row in todo:
            self.prompt = row.prompt
            with Image.open(row.path) as header:
                size = header.size
            began = time.process_time()
            opened = open_scaled(row.path, (self.detector or self.embedder).input.resized(*size))
            decoded = time.process_time()
            if self.detector:
                self.shapes[detector_tensor(self.detector, opened).shape] += 1
            detector_resized = time.process_time()
            self.embedder.input.tensor(opened.picture)
            embedder_resized = time.process_time()
            self.decode_s += decoded - began
            self.resize_s += detector_resized - decoded
            self.resize_s += self.regions_per_image * (embedder_resized - detector_resized)

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

    def embeddings_s(self, images: int) -> float:
        count = max(1, round(images * self.regions_per_image))
        side = (224, 224) if not hasattr(self.embedder.input, "size") else self.embedder.input.size[::-1]
        spent_s = 0.0
        for size in batches(count, self.batch):
            pixels = np.random.default_rng(1).normal(0, 1, (size, 3, *side)).astype(np.float32)
            if not spent_s:
                self.embedder.vectors(pixels)
            began = time.process_time()
            self.embedder.vectors(pixels)
            spent_s += time.process_time() - began
        return spent_s * images * self.regions_per_image / count


def batches(count: int, most: int) -> list[int]:
    return [min(most, count - start) for start in range(0, count, most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="SQLite file of a set, table images")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--detector", type=Path)
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--regions-per-image", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    floor = Floor(arguments)
    todo = list(rows(arguments.photos, arguments.limit))
    for row in todo:
        Path(row.path).read_bytes()
    floor.pixels(todo)
    images = len(todo)
    costs = {"decode": floor.decode_s, "resize": floor.resize_s, "embed": floor.embeddings_s(images)}
    if floor.detector:
        costs["detect"] = floor.detections_s()
    line = {f"{stage}_cpu_s_per_image": round(spent_s / images, 6) for stage, spent_s in costs.items()}
    print(json.dumps({"images": images} | line))


if __name__ == "__main__":
    main()
