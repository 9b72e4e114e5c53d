"""What the export scripts share about Hugging Face folders: reading them, the picture that proves a graph, and
`reference.json`, by which croprow sees that its own runtime gives the numbers that PyTorch gave.

No torch in here: numpy and the standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

# Beside the graph, where the source folder has them. `processor_config.json` is where transformers 5 may keep
# the image processor.
SETTINGS_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "LICENSE",
)
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

REFERENCE_FORMAT = "croprow-reference-1"
SIGNIFICANT_DIGITS = 7


class ExportError(Exception):
    """The export cannot go on; the message says what to do."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ExportError(f"{path} is missing") from None
    except json.JSONDecodeError as e:
        raise ExportError(f"{path} is not JSON: {e}") from None


def model_type_of(folder: Path, known: list[str]) -> str:
    """`model_type` of config.json, if it is one of `known` and the folder holds safetensors."""
    if not folder.is_dir():
        raise ExportError(f"{folder} is not a folder")
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in known:
        listed = ", ".join(sorted(known))
        raise ExportError(f"{folder / 'config.json'}: model_type is {model_type!r}; known are {listed}")
    if not any((folder / name).is_file() for name in WEIGHTS):
        hint = "; convert pytorch_model.bin to safetensors first" if (folder / "pytorch_model.bin").is_file() else ""
        raise ExportError(f"{folder} holds no model.safetensors{hint}")
    return model_type


def image_settings(folder: Path) -> dict[str, Any]:
    """The image processor's settings, from either place."""
    if (folder / "preprocessor_config.json").is_file():
        return read_json(folder / "preprocessor_config.json")
    if (folder / "processor_config.json").is_file():
        settings = read_json(folder / "processor_config.json")
        return settings.get("image_processor", settings)
    raise ExportError(f"{folder} holds neither preprocessor_config.json nor processor_config.json")


def copy_settings(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS_FILES:
        if (source / name).is_file() and (source / name).resolve() != (target / name).resolve():
            shutil.copyfile(source / name, target / name)


def mean_and_std(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """For values from 0 to 1; a processor that does not normalise has 0 and 1."""
    if not settings.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    try:
        return list(settings["image_mean"]), list(settings["image_std"])
    except KeyError as e:
        raise ExportError(f"the image processor's settings have no {e}") from None


def pattern_pixels(width_px: int, height_px: int) -> np.ndarray:
    """uint8 [h, w, 3]: a picture that any program can make, full of edges, no two corners alike.

    >>> pattern_pixels(16, 16)[8, 8].tolist()
    [105, 190, 19]
    """
    y, x, c = np.mgrid[:height_px, :width_px, :3]
    x, y = x // 8, y // 8
    return ((x * 37 + y * 61 + x * y * 7 + c * 85) % 256).astype(np.uint8)


def pattern_tensor(width_px: int, height_px: int, mean: list[float], std: list[float]) -> np.ndarray:
    """f32 [3, h, w]: `pattern_pixels`, normalised."""
    return normalised(pattern_pixels(width_px, height_px), mean, std)


def normalised(pixels: np.ndarray, mean: list[float], std: list[float]) -> np.ndarray:
    """uint8 [h, w, 3] to f32 [3, h, w]: (value / 255 - mean) / std."""
    values = (pixels.astype(np.float64) / 255 - np.array(mean)) / np.array(std)
    return np.ascontiguousarray(values.transpose(2, 0, 1).astype(np.float32))


def rounded(values: Any) -> Any:
    """Numbers, or lists or dictionaries of them, to `SIGNIFICANT_DIGITS`.

    >>> rounded([1 / 3, 12345.678901])
    [0.3333333, 12345.68]
    """
    if isinstance(values, (np.ndarray, np.generic)):
        values = values.tolist()
    if isinstance(values, list):
        return [rounded(value) for value in values]
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    return float(f"{values:.{SIGNIFICANT_DIGITS}g}") if isinstance(values, float) else values


def write_json(path: Path, content: Any) -> None:
    """Indented, but each list of plain values on one line, so that a diff can be read."""
    text = json.dumps(content, indent=1)
    innermost_list = re.compile(r"\[\n\s*([^\[\]{}]*?)\s*\n\s*\]")
    text = innermost_list.sub(lambda found: "[" + re.sub(r",\n\s*", ", ", found.group(1)) + "]", text)
    if json.loads(text) != content:
        raise ValueError("the shortened JSON does not say the same")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def write_reference(folder: Path, kind: str, mean: list[float], std: list[float], cases: list[dict[str, Any]]) -> None:
    content = {"format": REFERENCE_FORMAT, "kind": kind, "mean": mean, "std": std, "cases": cases}
    write_json(folder / "reference.json", content)
