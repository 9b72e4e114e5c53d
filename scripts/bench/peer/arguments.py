"""What all peers are told."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

BOX_THRESHOLD, TEXT_THRESHOLD = 0.30, 0.25


def peer_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--photos", type=Path, required=True, help="SQLite file of a set, table images")
    parser.add_argument("--limit", type=int, default=32, help="how many of its photos")
    parser.add_argument("--out", type=Path, required=True, help="SQLite file to write; is overwritten")
    parser.add_argument("--detector", type=Path, help="model folder; without it the whole image is the region")
    parser.add_argument("--embedder", type=Path, required=True, help="model folder")
    parser.add_argument("--batch", type=int, default=4, help="images in one call of a model")
    parser.add_argument("--threads", type=int, default=cores, help="of a model's call")
    parser.add_argument("--workers", type=int, default=cores, help="threads or processes that decode")
    return parser
