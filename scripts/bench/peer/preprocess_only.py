"""Decode, orient, resize to shortest 256, crop the centre 224, normalise: that alone, in many ways, on all cores.

Nothing is embedded and nothing is written, so that this is the most that a program around it could reach.

Example: preprocess_only.py --photos mix.db --limit 40 --method pillow_draft --workers 2
"""

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

import argparse  # noqa: E402
import multiprocessing  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from photo_list import rows  # noqa: E402
from preprocessing_ways import WAYS, open_way  # noqa: E402
from stopwatch import Stopwatch  # noqa: E402

prepare = None


def work(path: str) -> None:
    prepare(path)


def main() -> None:
    global prepare
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="SQLite file of a set, table images")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--method", choices=WAYS, default="pillow_draft")
    parser.add_argument("--processor", type=Path, required=True, help="folder with preprocessor_config.json")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--least-s", type=float, default=1.0, help="go over the photos again until this is over")
    arguments = parser.parse_args()
    stopwatch = Stopwatch(f"preprocess only: {arguments.method}")
    prepare = open_way(arguments.method, arguments.processor)
    paths = [row.path for row in rows(arguments.photos, arguments.limit)]
    prepare(paths[0])
    images = 0
    with multiprocessing.get_context("fork").Pool(arguments.workers) as pool:
        pool.map(work, paths[: 2 * arguments.workers], chunksize=1)
        stopwatch.start()
        ends_s = time.perf_counter() + arguments.least_s
        while not images or time.perf_counter() < ends_s:
            pool.map(work, paths, chunksize=1)
            images += len(paths)
        stopwatch.stop()
    stopwatch.report(images)


if __name__ == "__main__":
    main()
