"""torch's DataLoader, whose processes decode and run the Hugging Face processor, in front of the models.

Example: dataloader_transformers.py --photos mix.db --limit 16 --out out.db --detector gdino --embedder dinov2
"""

from __future__ import annotations

from stopwatch import Stopwatch

STOPWATCH = Stopwatch("DataLoader + transformers")

import argparse  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import torch  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from arguments import peer_parser  # noqa: E402
from hugging_face import Detector, Embedder  # noqa: E402
from photo_list import pages  # noqa: E402
from pictures import clamped_crop, open_upright_rgb  # noqa: E402
from results import ResultWriter, whole  # noqa: E402

BATCHES_AHEAD = 2


class Batches(IterableDataset):
    """Each process pages the table itself and takes every n-th batch. With a detector a batch holds photos and the
    detector's inputs; without one the photos' sizes and the embedder's input, since pixels are costly to hand over."""

    def __init__(self, arguments: argparse.Namespace, detector: Detector | None, embedder: Embedder) -> None:
        self.arguments = arguments
        self.detector, self.embedder = detector, embedder

    def __iter__(self) -> Iterator[tuple]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        torch.set_num_threads(1)
        number = 0
        for page in pages(self.arguments.photos, self.arguments.limit):
            for start in range(0, len(page), self.arguments.batch):
                if number % workers == index:
                    yield self._batch(page[start : start + self.arguments.batch])
                number += 1

    def _batch(self, rows: list) -> tuple:
        images = [open_upright_rgb(row.path) for row in rows]
        if self.detector:
            return rows, images, self.detector.inputs(images, [row.prompt for row in rows])
        return rows, [image.size for image in images], self.embedder.inputs(images)


def work(batches: DataLoader, detector: Detector | None, embedder: Embedder, writer: ResultWriter) -> int:
    """Returns how many photos there were. Waits for the processes, so that their CPU time counts."""
    images = 0
    remaining = iter(batches)
    while True:
        with STOPWATCH.stage("wait"):
            batch = next(remaining, None)
        if batch is None:
            STOPWATCH.stop()
            return images
        rows, photos, inputs = batch
        if detector:
            with STOPWATCH.stage("detect"):
                regions = detector.detect(inputs, photos)
            with STOPWATCH.stage("crop"):
                pixels = embedder.inputs([clamped_crop(photo, region.box) for photo, region in zip(photos, regions)])
        else:
            regions, pixels = [whole(*size) for size in photos], inputs
        with STOPWATCH.stage("embed"):
            vectors = embedder.vectors(pixels)
        writer.write((row.id, 0, region, vector) for row, region, vector in zip(rows, regions, vectors))
        images += len(rows)


def main() -> None:
    arguments = peer_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    detector = Detector(arguments.detector) if arguments.detector else None
    embedder = Embedder(arguments.embedder, arguments.threads)
    writer = ResultWriter(arguments.out)
    STOPWATCH.start()
    batches = DataLoader(
        Batches(arguments, detector, embedder),
        batch_size=None,
        num_workers=arguments.workers,
        prefetch_factor=BATCHES_AHEAD if arguments.workers else None,
    )
    with torch.inference_mode():
        images = work(batches, detector, embedder, writer)
    STOPWATCH.report(images, regions=images)


if __name__ == "__main__":
    main()
