"""Models and processors as transformers gives them, for the two peers that use torch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import (  # noqa: E402
    AutoImageProcessor,
    AutoModel,
    AutoModelForZeroShotObjectDetection,
    AutoProcessor,
)
from transformers.utils import logging  # noqa: E402

from arguments import BOX_THRESHOLD, TEXT_THRESHOLD  # noqa: E402
from results import Region, whole  # noqa: E402

logging.disable_progress_bar()


class Detector:
    """GroundingDINO; keeps the best box of a photo, else the whole of it."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForZeroShotObjectDetection.from_pretrained(folder).eval()

    def inputs(self, images: list[Image.Image], prompts: list[str]) -> dict[str, torch.Tensor]:
        return dict(self.processor(images=images, text=prompts, padding=True, return_tensors="pt"))

    def detect(self, inputs: dict[str, torch.Tensor], images: list[Image.Image]) -> list[Region]:
        results = self.processor.post_process_grounded_object_detection(
            self.model(**inputs),
            inputs["input_ids"],
            threshold=BOX_THRESHOLD,
            text_threshold=TEXT_THRESHOLD,
            target_sizes=[(image.height, image.width) for image in images],
        )
        return [self._best(result, image) for result, image in zip(results, images)]

    @staticmethod
    def _best(result: dict, image: Image.Image) -> Region:
        if not len(result["scores"]):
            return whole(*image.size)
        best = int(result["scores"].argmax())
        box = tuple(result["boxes"][best].tolist())
        return Region(float(result["scores"][best]), box, result["text_labels"][best])


class Embedder:
    """A torch model, or, where the folder has none, its ONNX file through onnxruntime; the processor is the same."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.processor = AutoImageProcessor.from_pretrained(folder)
        if (folder / "model.safetensors").is_file():
            self.model = AutoModel.from_pretrained(folder).eval()
        else:
            from graphs import Embedder as Graph

            self.model, self.graph = None, Graph(folder, threads)

    def inputs(self, images: list[Image.Image]) -> torch.Tensor:
        return self.processor(images=images, return_tensors="pt")["pixel_values"]

    def vectors(self, pixels: torch.Tensor) -> np.ndarray:
        if self.model is None:
            return self.graph.vectors(pixels.numpy())
        return self.model(pixel_values=pixels).last_hidden_state[:, 0].numpy()
