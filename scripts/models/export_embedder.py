"""Export a Hugging Face image embedder to the folder that croprow takes: model.onnx, settings, reference.json.

    python3 -m venv .demo/venv-export
    .demo/venv-export/bin/pip install -r scripts/models/requirements-export.txt
    .demo/venv-export/bin/python scripts/models/export_embedder.py dinov2-small/ embedders/dinov2-small/

MODEL_DIR is a folder as `huggingface-cli download` leaves it: config.json, preprocessor_config.json and
model.safetensors.

    model_type                        vector                            size
    dinov2, dinov3_vit                last_hidden_state, the first      free
                                        token (CLS)
    dinov2_with_registers, vit        the same                          the processor's
    clip, clip_vision_model           image_embeds                      the processor's
    siglip, siglip_vision_model       pooler_output                     the processor's
    convnext, resnet                  pooler_output                     free
    swin                              pooler_output                     the processor's

Of clip the image half is exported, and with --whole all of it (input_ids, pixel_values, attention_mask ->
logits_per_image, logits_per_text, text_embeds, image_embeds); of siglip always the image half. The batch is free in
all of them. The graph is run against PyTorch at several sizes and batch sizes; if it differs, nothing is left.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from export_packages import require_packages

require_packages()

import numpy as np  # noqa: E402

from export_detector import OTHER_PROMPTS, PROMPT, batch_of_patterns, labels_of  # noqa: E402
from hf_folder import (  # noqa: E402
    ExportError,
    copy_settings,
    image_settings,
    mean_and_std,
    model_type_of,
    rounded,
    write_reference,
)
from torch_export import Differences, Feed, Signature, export_graph, require_equal, run_torch  # noqa: E402

# Of the largest value: vectors of some families are hundreds long.
RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Family:
    outputs: tuple[str, ...]
    vector: str
    free_size: bool = False
    # Position embeddings are resized with antialiasing, which the exporter does not know: done once, while exporting.
    freezes_positions: bool = False
    # Name of the class that takes pixel_values only, where AutoModel takes text too.
    image_half: str | None = None


TOKENS = ("last_hidden_state",)
POOLED = ("last_hidden_state", "pooler_output")
CLS = "last_hidden_state[:, 0]"
FAMILIES = {
    "dinov2": Family(TOKENS, CLS, free_size=True),
    "dinov2_with_registers": Family(TOKENS, CLS, freezes_positions=True),
    "dinov3_vit": Family(POOLED, CLS, free_size=True),
    "vit": Family(TOKENS, CLS),
    "clip": Family(("image_embeds", "last_hidden_state"), "image_embeds", image_half="CLIPVisionModelWithProjection"),
    "clip_vision_model": Family(
        ("image_embeds", "last_hidden_state"), "image_embeds", image_half="CLIPVisionModelWithProjection"
    ),
    "siglip": Family(POOLED, "pooler_output", image_half="SiglipVisionModel"),
    "siglip_vision_model": Family(POOLED, "pooler_output", image_half="SiglipVisionModel"),
    "convnext": Family(POOLED, "pooler_output", free_size=True),
    "swin": Family(POOLED, "pooler_output"),
    "resnet": Family(POOLED, "pooler_output", free_size=True),
}
WHOLE_CLIP = Family(("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"), "image_embeds")


class Embedder:
    """A model from a folder, and how it is fed."""

    def __init__(self, folder: Path, whole: bool = False) -> None:
        self.folder = folder
        self.model_type = model_type_of(folder, list(FAMILIES))
        if whole and self.model_type != "clip":
            raise ExportError(f"--whole is for clip, and this is {self.model_type}")
        self.whole = whole
        self.family = WHOLE_CLIP if whole else FAMILIES[self.model_type]
        self.settings = image_settings(folder)
        self.mean, self.std = mean_and_std(self.settings)
        self.model = self._load_model()
        self.tokenizer = self._load_tokenizer() if whole else None

    def _load_model(self):
        import transformers

        auto = getattr(transformers, self.family.image_half) if self.family.image_half else transformers.AutoModel
        model, report = auto.from_pretrained(self.folder, output_loading_info=True, dtype="float32")
        # Published ViT checkpoints come without a pooler; it is not used here.
        missing = [key for key in report["missing_keys"] if not key.startswith("pooler.")]
        if missing:
            raise ExportError(f"{self.folder}: the weights lack {len(missing)} tensors, such as {sorted(missing)[0]}")
        return model.eval()

    def _load_tokenizer(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError) as e:
            raise ExportError(f"{self.folder}: clip as a whole needs its tokenizer's files ({e})") from e

    @property
    def size(self) -> tuple[int, int]:
        """width, height that the processor gives."""
        crops = self.settings.get("do_center_crop", False)
        size = self.settings.get("crop_size" if crops else "size")
        if isinstance(size, dict):
            height, width = (size.get(key, size.get("shortest_edge")) for key in ("height", "width"))
        else:
            height = width = size
        if not isinstance(height, int) or not isinstance(width, int):
            raise ExportError(f"{self.folder}: no size can be read from the image processor's settings: {size}")
        return width, height

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        if not self.family.freezes_positions:
            yield
            return
        import torch

        embeddings = self.model.embeddings
        width, height = self.size
        tokens = 1 + (height // embeddings.patch_size) * (width // embeddings.patch_size)
        empty = torch.zeros(1, tokens, self.model.config.hidden_size)
        positions = embeddings.interpolate_pos_encoding(empty, height, width)
        embeddings.interpolate_pos_encoding = lambda *_sizes: positions
        try:
            yield
        finally:
            del embeddings.interpolate_pos_encoding

    def __call__(self, *inputs):
        outputs = self.model(**dict(zip(self.signature().inputs, inputs)), return_dict=True)
        return {name: outputs[name] for name in self.family.outputs}

    def signature(self) -> Signature:
        pixels = {0: "batch_size"} | ({2: "height", 3: "width"} if self.family.free_size else {})
        outputs = {name: {0: "batch_size"} for name in self.family.outputs}
        if not self.whole:
            return Signature({"pixel_values": pixels}, outputs)
        text = {0: "text_batch_size", 1: "sequence_length"}
        outputs |= {
            "logits_per_image": {0: "batch_size", 1: "text_batch_size"},
            "logits_per_text": {0: "text_batch_size", 1: "batch_size"},
            "text_embeds": {0: "text_batch_size"},
        }
        return Signature({"input_ids": text, "pixel_values": pixels, "attention_mask": text}, outputs)

    def feed(self, pixels: np.ndarray, prompt: str = PROMPT) -> Feed:
        """pixels [batch, 3, h, w]."""
        if not self.whole:
            return {"pixel_values": pixels}
        encoded = self.tokenizer(labels_of(prompt), padding=True)
        ids, mask = (np.array(encoded[key], np.int64) for key in ("input_ids", "attention_mask"))
        return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask}

    def vectors(self, outputs: dict[str, np.ndarray]) -> np.ndarray:
        """[batch, dim], as the model gives them."""
        if self.family.vector == CLS:
            return outputs["last_hidden_state"][:, 0]
        return outputs[self.family.vector].reshape(len(outputs[self.family.vector]), -1)


def sizes_of(embedder: Embedder) -> list[tuple[int, int]]:
    """The processor's size, and where others are possible one that is not square."""
    width, height = embedder.size
    return [(width, height)] + ([(width * 3 // 2, height)] if embedder.family.free_size else [])


def checked_feeds(embedder: Embedder) -> list[Feed]:
    feeds = [embedder.feed(batch_of_patterns(embedder, size, n)) for size in sizes_of(embedder) for n in (1, 3)]
    if embedder.whole:
        pixels = batch_of_patterns(embedder, embedder.size, 2)
        feeds += [embedder.feed(pixels, prompt) for prompt in OTHER_PROMPTS]
    return feeds


def reference_cases(embedder: Embedder) -> list[dict]:
    cases = []
    for width, height in sizes_of(embedder):
        outputs = run_torch(embedder, embedder.feed(batch_of_patterns(embedder, (width, height), 1)))
        vector = rounded(embedder.vectors(outputs)[0].astype(float))
        cases.append({"width_px": width, "height_px": height, "vector": vector})
    return cases


def export(model_dir: Path, out_dir: Path, whole: bool = False) -> tuple[Embedder, Differences]:
    """Writes `out_dir` and says how far the graph is from PyTorch."""
    embedder = Embedder(model_dir, whole)
    part = out_dir / "model.part.onnx"
    try:
        # Two images: a batch of 1 would be taken for a constant.
        example = embedder.feed(batch_of_patterns(embedder, embedder.size, 2))
        export_graph(embedder, example, embedder.signature(), part)
        largest = {name: float(np.abs(values).max()) for name, values in run_torch(embedder, example).items()}
        tolerances = {name: RELATIVE_TOLERANCE * max(value, 1.0) for name, value in largest.items()}
        differences = require_equal(embedder, part, checked_feeds(embedder), tolerances)
        copy_settings(model_dir, out_dir)
        write_reference(out_dir, "embedder", embedder.mean, embedder.std, reference_cases(embedder))
        part.replace(out_dir / "model.onnx")
    finally:
        part.unlink(missing_ok=True)
    return embedder, differences


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a Hugging Face image embedder for croprow.")
    parser.add_argument("model_dir", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("out_dir", type=Path, help="folder to write")
    parser.add_argument("--whole", action="store_true", help="clip with its text half")
    args = parser.parse_args()
    try:
        embedder, differences = export(args.model_dir, args.out_dir, args.whole)
    except ExportError as e:
        sys.exit(f"error: {e}")
    graph = args.out_dir / "model.onnx"
    print(f"{graph}: {embedder.model_type}, {graph.stat().st_size / 1e6:.1f} MB; {differences}")


if __name__ == "__main__":
    main()
