"""How near each way of preprocessing stays to the Hugging Face path: the least cosine of embeddings over some photos.

Writes JSON {"photos": n, "least_cosine": {way: cosine}} and, beside it, the vectors of the Hugging Face path as .npz by
the photo's id. With --against it compares the vectors in a database of croprow with those instead, and prints JSON.

Example: cosine_of_ways.py --photos mix.db --embedder dinov2-small-onnx --out cosine.json
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
from pathlib import Path

import numpy as np

from graphs import Embedder
from photo_list import rows
from preprocessing_ways import REFERENCE, WAYS, open_way

BATCH = 4


def vectors_of(way: str, paths: list[str], embedder: Embedder, processor: Path) -> np.ndarray:
    """[n, dim], each of length 1."""
    prepare = open_way(way, processor)
    parts = [
        embedder.vectors(np.stack([prepare(path) for path in paths[start : start + BATCH]]))
        for start in range(0, len(paths), BATCH)
    ]
    return unit_length(np.concatenate(parts))


def unit_length(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def compare_ways(photos: Path, limit: int, folder: Path, out: Path) -> None:
    todo = list(rows(photos, limit))
    embedder = Embedder(folder, len(os.sched_getaffinity(0)))
    paths = [row.path for row in todo]
    reference = vectors_of(REFERENCE, paths, embedder, folder)
    least = {}
    for way in WAYS:
        try:
            vectors = vectors_of(way, paths, embedder, folder)
        except (ImportError, OSError, RuntimeError) as error:
            print(f"  {way}: left out ({error})")
            continue
        least[way] = round(float((vectors * reference).sum(axis=1).min()), 6)
        print(f"  {way}: cosine {least[way]:.6f} at least")
    np.savez(out.with_suffix(".npz"), ids=[row.id for row in todo], vectors=reference)
    out.write_text(json.dumps({"photos": len(todo), "least_cosine": least}, indent=1) + "\n")


def compare_database(database: Path, out: Path) -> None:
    stored = np.load(out.with_suffix(".npz"))
    reference = dict(zip(stored["ids"].tolist(), stored["vectors"]))
    query = (
        "SELECT CAST(images.key AS INTEGER), vector FROM embeddings "
        "JOIN regions ON regions.id = region_id JOIN images ON images.id = regions.image_id"
    )
    cosines = [
        float((unit_length(np.frombuffer(vector, "<f4")) * reference[key]).sum())
        for key, vector in sqlite3.connect(database).execute(query)
        if key in reference
    ]
    print(json.dumps({"photos": len(cosines), "least_cosine": round(min(cosines), 6)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="SQLite file of a set, table images")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--embedder", type=Path, help="ONNX folder with preprocessor_config.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="a database of croprow over the same photos")
    arguments = parser.parse_args()
    if arguments.against:
        compare_database(arguments.against, arguments.out)
    else:
        compare_ways(arguments.photos, arguments.limit, arguments.embedder, arguments.out)


if __name__ == "__main__":
    main()
