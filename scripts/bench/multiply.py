"""Make a large database out of a small one: every image again and again, with its candidates, regions and vectors.

The copies have keys of their own, so that they are rows like any others; the files are the same. What a verb
costs on many rows can be measured so without working on many files.

Example: multiply.py frames.db large.db --images 100000
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
from pathlib import Path


def columns_of(db: sqlite3.Connection, table: str, without: set[str]) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] not in without]


def multiply(db: sqlite3.Connection, images: int) -> int:
    """Copies whole rounds of the first images until there are at least `images`; returns how many there are."""
    first, highest = db.execute("SELECT count(*), max(id) FROM images").fetchone()
    region_highest = db.execute("SELECT ifnull(max(id), 0) FROM regions").fetchone()[0]
    image_columns = ", ".join(columns_of(db, "images", {"id", "key", "run_id", "token"}))
    region_columns = ", ".join(columns_of(db, "regions", {"id", "image_id"}))
    rounds = -(-images // first)
    for copy in range(1, rounds):
        shift, region_shift = copy * highest, copy * region_highest
        db.execute(
            f"INSERT INTO images (id, key, {image_columns}) SELECT id + ?1, 'copy ' || (id + ?1), {image_columns} "
            "FROM images WHERE id <= ?2",
            (shift, highest),
        )
        db.execute(
            "INSERT INTO candidates SELECT image_id + ?1, recipe_id, vocabulary_id, count, packed FROM candidates "
            "WHERE image_id <= ?2",
            (shift, highest),
        )
        db.execute(
            f"INSERT INTO regions (id, image_id, {region_columns}) SELECT id + ?1, image_id + ?2, {region_columns} "
            "FROM regions WHERE id <= ?3",
            (region_shift, shift, region_highest),
        )
        db.execute(
            "INSERT INTO embeddings SELECT region_id + ?1, recipe_id, dim, dtype, vector FROM embeddings "
            "WHERE region_id <= ?2",
            (region_shift, region_highest),
        )
        db.commit()
    return rounds * first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path, help="is overwritten")
    parser.add_argument("--images", type=int, default=100_000)
    arguments = parser.parse_args()
    with sqlite3.connect(arguments.small) as source:
        source.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for suffix in ("-wal", "-shm"):
        Path(f"{arguments.large}{suffix}").unlink(missing_ok=True)
    shutil.copyfile(arguments.small, arguments.large)
    with sqlite3.connect(arguments.large) as db:
        print(f"{multiply(db, arguments.images)} images in {arguments.large}")


if __name__ == "__main__":
    main()
