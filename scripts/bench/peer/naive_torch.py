"""What most scripts do: open all photos into a list, detect in batches, crop, embed, write at the end.

Example: naive_torch.py --photos mix.db --limit 16 --out out.db --detector gdino --embedder dinov2
"""

from __future__ import annotations

from stopwatch import Stopwatch

STOPWATCH = Stopwatch("naive torch")

import torch  # noqa: E402

from arguments import peer_parser  # noqa: E402
from hugging_face import Detector, Embedder  # noqa: E402
from photo_list import rows  # noqa: E402
from pictures import clamped_crop, open_upright_rgb  # noqa: E402
from results import ResultWriter, whole  # noqa: E402


def main() -> None:
    arguments = peer_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    detector = Detector(arguments.detector) if arguments.detector else None
    embedder = Embedder(arguments.embedder, arguments.threads)
    STOPWATCH.start()
    todo = list(rows(arguments.photos, arguments.limit))
    with STOPWATCH.stage("decode"):
        images = [open_upright_rgb(row.path) for row in todo]
    found = []
    with torch.no_grad():
        for start in range(0, len(todo), arguments.batch):
            batch = slice(start, start + arguments.batch)
            regions = [whole(*image.size) for image in images[batch]]
            if detector:
                with STOPWATCH.stage("prepare"):
                    inputs = detector.inputs(images[batch], [row.prompt for row in todo[batch]])
                with STOPWATCH.stage("detect"):
                    regions = detector.detect(inputs, images[batch])
            with STOPWATCH.stage("crop"):
                crops = [clamped_crop(image, region.box) for image, region in zip(images[batch], regions)]
                pixels = embedder.inputs(crops)
            with STOPWATCH.stage("embed"):
                vectors = embedder.vectors(pixels)
            found += [(row.id, 0, region, vector) for row, region, vector in zip(todo[batch], regions, vectors)]
    ResultWriter(arguments.out).write(found)
    STOPWATCH.report(len(todo), regions=len(found))


if __name__ == "__main__":
    main()
