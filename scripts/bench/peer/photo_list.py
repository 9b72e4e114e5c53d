"""The photos of a set, read from its SQLite file page by page as a job on a large table has to."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_ROWS = 64


@dataclass(frozen=True)
class Row:
    id: int
    path: str
    prompt: str


def pages(photos: Path, limit: int) -> Iterator[list[Row]]:
    """The first `limit` rows in the order of their ids."""
    connection = sqlite3.connect(photos)
    cursor = connection.execute("SELECT id, path, prompt FROM images ORDER BY id LIMIT ?", (limit,))
    while rows := cursor.fetchmany(PAGE_ROWS):
        yield [Row(*row) for row in rows]


def rows(photos: Path, limit: int) -> Iterator[Row]:
    for page in pages(photos, limit):
        yield from page
