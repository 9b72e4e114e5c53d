#!/usr/bin/env python3
"""Prints the regions of a croprow database as a table: file, label, score, box (pixels, x0 y0 x1 y1).

usage: scripts/show_results.py DATABASE
"""

import os
import sqlite3
import sys


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    database = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
    rows = database.execute(
        "SELECT i.path, r.label, r.score, r.x0, r.y0, r.x1, r.y1, r.embedded"
        " FROM images i LEFT JOIN results r ON r.image_id = i.id ORDER BY i.path, r.score DESC"
    ).fetchall()
    print(f"{'file':<22}{'label':<14}{'score':>6}  {'box':<24}vector")
    last = None
    for path, label, score, *box, embedded in rows:
        name = os.path.basename(os.fsdecode(path))
        shown = "" if name == last else name
        last = name
        if box[0] is None:
            print(f"{shown:<22}nothing found")
        elif score is None:
            print(f"{shown:<22}whole image{'':<36}{'yes' if embedded else 'no'}")
        else:
            edges = " ".join(f"{edge:.0f}" for edge in box)
            print(f"{shown:<22}{label:<14}{score:>6.2f}  {edges:<24}{'yes' if embedded else 'no'}")


if __name__ == "__main__":
    main()
