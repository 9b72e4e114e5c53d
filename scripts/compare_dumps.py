#!/usr/bin/env python3
"""Compares what two croprow databases hold. Ids, times, attempts, runs and samples do not count.

States, codes, labels and counts must be equal; boxes within --box-px pixels, scores within --score, vectors
at a cosine of at least --cosine. Rows are matched by path and key, regions by label and nearest box.
--without-vectors leaves vectors and the embedder's states out: for regions that still wait for it.
Exit code 0: equal. 1: they differ; the first differences are printed.

usage: scripts/compare_dumps.py A.db B.db [--box-px 0.01] [--score 1e-4] [--cosine 0.99999] [--without-vectors]
"""

import argparse
import math
import sqlite3
import struct
import sys
from typing import Any

SHOWN_MAX = 10


def load(path: str, with_vectors: bool) -> dict[Any, dict[str, Any]]:
    """path and key -> the image's row and its regions."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    database.row_factory = sqlite3.Row
    images = {}
    for row in database.execute(
        "SELECT id, path, key, tag, prompt, detect_state, detect_code, embed_state, embed_code, format, width_px,"
        " height_px, orientation, truncated FROM images ORDER BY path"
    ):
        left_out = {"id"} if with_vectors else {"id", "embed_state", "embed_code"}
        fields = {name: row[name] for name in row.keys() if name not in left_out}
        regions = database.execute(
            f"SELECT r.label, r.score, r.x0, r.y0, r.x1, r.y1, {'e.vector' if with_vectors else 'NULL'} AS vector FROM regions r"
            " LEFT JOIN embeddings e ON e.region_id = r.id WHERE r.image_id = ?",
            [row["id"]],
        ).fetchall()
        images[row["path"], row["key"]] = {"fields": fields, "regions": [dict(region) for region in regions]}
    return images


def box_distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(abs(a[edge] - b[edge]) for edge in ("x0", "y0", "x1", "y1"))


def cosine(a: bytes, b: bytes) -> float:
    """Of two little-endian f32 vectors of the same length."""
    count = len(a) // 4
    x, y = struct.unpack(f"<{count}f", a), struct.unpack(f"<{count}f", b)
    dot = math.fsum(p * q for p, q in zip(x, y))
    return dot / math.sqrt(math.fsum(p * p for p in x) * math.fsum(q * q for q in y))


def compare_regions(path: Any, a: list[dict[str, Any]], b: list[dict[str, Any]], limits: argparse.Namespace) -> list[str]:
    if len(a) != len(b):
        return [f"{path}: {len(a)} regions against {len(b)}"]
    faults, rest = [], list(b)
    for region in a:
        alike = [other for other in rest if other["label"] == region["label"]]
        if not alike:
            return faults + [f"{path}: no second region {region['label']}"]
        other = min(alike, key=lambda candidate: box_distance(region, candidate))
        rest.remove(other)
        distance = box_distance(region, other)
        if distance > limits.box_px:
            faults.append(f"{path}: {region['label']}: boxes differ by {distance:.4f} px")
        if (region["score"] is None) != (other["score"] is None):
            faults.append(f"{path}: a score is missing")
        elif region["score"] is not None and abs(region["score"] - other["score"]) > limits.score:
            faults.append(f"{path}: {region['label']}: scores {region['score']} and {other['score']}")
        if (region["vector"] is None) != (other["vector"] is None):
            faults.append(f"{path}: {region['label']}: a vector is missing")
        elif region["vector"] is not None:
            if len(region["vector"]) != len(other["vector"]):
                faults.append(f"{path}: {region['label']}: vectors of different length")
            elif (similarity := cosine(region["vector"], other["vector"])) < limits.cosine:
                faults.append(f"{path}: {region['label']}: cosine {similarity:.7f}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--box-px", type=float, default=0.01)
    parser.add_argument("--score", type=float, default=1e-4)
    parser.add_argument("--cosine", type=float, default=0.99999)
    parser.add_argument("--without-vectors", action="store_true")
    limits = parser.parse_args()
    a, b = (load(path, not limits.without_vectors) for path in (limits.a, limits.b))
    faults = [f"{path}: only in one of them" for path in a.keys() ^ b.keys()]
    regions = 0
    for path in sorted(a.keys() & b.keys(), key=str):
        if a[path]["fields"] != b[path]["fields"]:
            then, now = a[path]["fields"], b[path]["fields"]
            differ = [f"{name}: {then[name]} / {now[name]}" for name in then if then[name] != now[name]]
            faults.append(f"{path}: {', '.join(differ)}")
        faults += compare_regions(path, a[path]["regions"], b[path]["regions"], limits)
        regions += len(a[path]["regions"])
    for fault in faults[:SHOWN_MAX]:
        print(fault)
    if faults:
        sys.exit(f"{len(faults)} differences")
    print(f"equal: {len(a)} images, {regions} regions")


if __name__ == "__main__":
    main()
