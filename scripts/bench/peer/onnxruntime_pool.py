"""The strong peer: onnxruntime, a pool of threads that decode, photos of equal size batched together.

JPEGs are decoded at a fraction of their size (Pillow's draft mode), Pillow resizes (it lets other threads run),
batches hold photos of one input shape so that nothing is padded, prompts are tokenised by `tokenizers`, and torch is
not loaded.

Example: onnxruntime_pool.py --photos mix.db --limit 16 --out out.db --detector gdino-onnx --embedder dinov2-onnx
"""

from __future__ import annotations

from stopwatch import Stopwatch

STOPWATCH = Stopwatch("onnxruntime + threads")

import argparse  # noqa: E402
from collections import deque  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from concurrent.futures import Future, ThreadPoolExecutor  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from arguments import peer_parser  # noqa: E402
from graphs import Embedder, detector_tensor, open_detector  # noqa: E402
from photo_list import Row, rows  # noqa: E402
from pictures import Opened, open_scaled  # noqa: E402
from results import Region, ResultWriter, whole  # noqa: E402

# In batches: photos that are being decoded, and photos that wait for others of their shape.
AHEAD, WAITING = 3, 4
# Crops in one call of the embedder.
MOST_CROPS = 16


@dataclass(frozen=True)
class Prepared:
    row: Row
    opened: Opened
    tensor: np.ndarray


class Peer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.batch = arguments.batch
        self.detector = open_detector(arguments.detector, arguments.threads) if arguments.detector else None
        self.embedder = Embedder(arguments.embedder, arguments.threads)
        self.pool = ThreadPoolExecutor(arguments.workers)
        self.writer = ResultWriter(arguments.out)
        self.regions = 0

    def prepare(self, row: Row) -> Prepared:
        """In the pool: up to the first model's input."""
        with Image.open(row.path) as header:
            size = header.size
        first = self.detector or self.embedder
        opened = open_scaled(row.path, first.input.resized(*size))
        if self.detector:
            return Prepared(row, opened, detector_tensor(self.detector, opened))
        return Prepared(row, opened, self.embedder.input.tensor(opened.picture))

    def prepared(self, todo: Iterator[Row]) -> Iterator[Prepared]:
        pending: deque[Future[Prepared]] = deque()
        while True:
            while len(pending) < AHEAD * self.batch and (row := next(todo, None)) is not None:
                pending.append(self.pool.submit(self.prepare, row))
            if not pending:
                return
            with STOPWATCH.stage("wait"):
                ready = pending.popleft().result()
            yield ready

    def batches(self, todo: Iterator[Row]) -> Iterator[list[Prepared]]:
        """Photos of one shape; incomplete batches where too many wait and at the end."""
        groups: dict[tuple[int, ...], list[Prepared]] = {}
        for each in self.prepared(todo):
            shape = each.tensor.shape
            groups.setdefault(shape, []).append(each)
            if len(groups[shape]) == self.batch:
                yield groups.pop(shape)
            elif sum(map(len, groups.values())) >= WAITING * self.batch:
                yield groups.pop(max(groups, key=lambda key: len(groups[key])))
        yield from groups.values()

    def work(self, batch: list[Prepared]) -> None:
        pixels = np.stack([each.tensor for each in batch])
        if not self.detector:
            with STOPWATCH.stage("embed"):
                vectors = self.embedder.vectors(pixels)
            regions = [(each, 0, whole(*each.opened.full)) for each in batch]
        else:
            with STOPWATCH.stage("detect"):
                sizes, prompts = [each.opened.full for each in batch], [each.row.prompt for each in batch]
                found = self.detector.detect(pixels, sizes, prompts)
            regions = [
                (each, number, region) for each, many in zip(batch, found) for number, region in enumerate(many)
            ]
            vectors = self.embed(regions)
        with STOPWATCH.stage("write"):
            self.writer.write(
                (each.row.id, number, region, vector) for (each, number, region), vector in zip(regions, vectors)
            )
        self.regions += len(regions)

    def embed(self, regions: list[tuple[Prepared, int, Region]]) -> list[np.ndarray]:
        with STOPWATCH.stage("crop"):
            crops = list(self.pool.map(self.crop, regions))
        vectors: list[np.ndarray] = []
        with STOPWATCH.stage("embed"):
            for start in range(0, len(crops), MOST_CROPS):
                vectors.extend(self.embedder.vectors(np.stack(crops[start : start + MOST_CROPS])))
        return vectors

    def crop(self, region: tuple[Prepared, int, Region]) -> np.ndarray:
        return self.embedder.input.tensor(region[0].opened.crop(region[2].box))


def main() -> None:
    arguments = peer_parser(__doc__).parse_args()
    peer = Peer(arguments)
    STOPWATCH.start()
    images = 0
    for batch in peer.batches(rows(arguments.photos, arguments.limit)):
        peer.work(batch)
        images += len(batch)
    STOPWATCH.report(images, regions=peer.regions)


if __name__ == "__main__":
    main()
