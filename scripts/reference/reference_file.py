"""Writes the reference files: JSON with one line for each list of numbers, so that a diff can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=1)
    innermost_list = re.compile(r"\[\n\s*([^\[\]{}]*?)\s*\n\s*\]")
    text = innermost_list.sub(lambda found: "[" + re.sub(r",\n\s*", ", ", found.group(1)) + "]", text)
    if json.loads(text) != content:
        raise ValueError("the shortened JSON does not say the same")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
