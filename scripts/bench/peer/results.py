"""What a peer found, written to SQLite: one row per region, one transaction per batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE results (
    image_id INTEGER, region INTEGER, score REAL, x0 REAL, y0 REAL, x1 REAL, y1 REAL, label TEXT, vector BLOB,
    PRIMARY KEY (image_id, region)
);
"""


@dataclass(frozen=True)
class Region:
    """A box in pixels of the upright photo, x0 y0 x1 y1."""

    score: float
    box: tuple[float, float, float, float]
    label: str


def whole(width: int, height: int) -> Region:
    return Region(0.0, (0.0, 0.0, float(width), float(height)), "")


class ResultWriter:
    def __init__(self, path: Path) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        self._connection = sqlite3.connect(path)
        self._connection.executescript(SCHEMA)

    def write(self, found: Iterable[tuple[int, int, Region, np.ndarray]]) -> None:
        """Image id, number of the region in the image, region, vector."""
        lines = [
            (image_id, number, region.score, *region.box, region.label, vector.astype("<f4").tobytes())
            for image_id, number, region, vector in found
        ]
        self._connection.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", lines)
        self._connection.commit()
