"""Says which packages the export scripts miss, before one of their imports fails."""

from __future__ import annotations

import importlib.util
import os
import sys

REQUIRED = ("numpy", "torch", "torchvision", "transformers", "safetensors", "onnx", "onnxruntime", "PIL", "scipy")


def require_packages() -> None:
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: this Python has no {', '.join(missing)}: pip install -r scripts/models/requirements-export.txt"
        )
    # Models come from folders; a hub that cannot be reached must not be waited for.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
