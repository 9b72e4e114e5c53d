"""Export a Hugging Face object detector to the folder that croprow takes: model.onnx, settings, reference.json.

    python3 -m venv .demo/venv-export
    .demo/venv-export/bin/pip install -r scripts/models/requirements-export.txt
    .demo/venv-export/bin/python scripts/models/export_detector.py detr-resnet-50/ detectors/detr-resnet-50/

MODEL_DIR is a folder as `huggingface-cli download` leaves it: config.json, preprocessor_config.json,
model.safetensors, and the tokenizer's files where the detector takes text.

    model_type         scores    sizes            inputs besides pixel_values
    detr               softmax   free             pixel_mask
    conditional_detr   sigmoid   free             pixel_mask
    deformable_detr    sigmoid   free             pixel_mask
    yolos              softmax   free
    rt_detr            sigmoid   the processor's
    rt_detr_v2         sigmoid   the processor's
    d_fine             sigmoid   the processor's
    owlvit, owlv2      sigmoid   the processor's  input_ids, attention_mask [texts, 16]; texts = images x labels

Outputs: logits [batch, queries, classes] and pred_boxes [batch, queries, 4], cx cy w h in 0..1. The batch is free in
all of them. The graph is run against PyTorch at several sizes and batch sizes; if it differs, nothing is left.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from export_packages import require_packages

require_packages()

import numpy as np  # noqa: E402

from hf_folder import (  # noqa: E402
    ExportError,
    copy_settings,
    image_settings,
    mean_and_std,
    model_type_of,
    pattern_tensor,
    rounded,
    write_reference,
)
from torch_export import (  # noqa: E402
    Differences,
    Feed,
    Signature,
    export_graph,
    largest_differences,
    require_equal,
    run_torch,
)

TOLERANCES = {"logits": 2e-3, "pred_boxes": 1e-4}
# The reference holds this many, best first.
DETECTIONS_KEPT = 20

# width, height. None is square, none has the aspect of another; multiples of 32 and others; one so narrow that the
# coarsest features are one wide.
TRACED_SIZE = (160, 128)
CHECKED_SIZES = [(160, 128), (128, 224), (203, 141), (29, 224)]
REFERENCE_SIZES = [(160, 128), (141, 203)]

PROMPT = "a cat. a dog."
OTHER_PROMPTS = ["a red bus. a small house. a tree.", "a person."]
TEXT_LENGTH = 16

# Where neighbours in the encoder's ranking are nearly equal, PyTorch and ONNX Runtime may take another one.
SELECTED_QUERIES_MAY_DIFFER = 0.02


@dataclass(frozen=True)
class Family:
    softmax: bool = False
    pixel_mask: bool = False
    free_size: bool = False
    text: bool = False
    # The encoder chooses the queries: their order and the last of them hang on tiny differences.
    selects_queries: bool = False


FAMILIES = {
    "detr": Family(softmax=True, pixel_mask=True, free_size=True),
    "conditional_detr": Family(pixel_mask=True, free_size=True),
    "deformable_detr": Family(pixel_mask=True, free_size=True),
    "yolos": Family(softmax=True, free_size=True),
    "rt_detr": Family(selects_queries=True),
    "rt_detr_v2": Family(selects_queries=True),
    "d_fine": Family(selects_queries=True),
    "owlvit": Family(text=True),
    "owlv2": Family(text=True),
}


class Detector:
    """A model from a folder, and how it is fed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_type = model_type_of(folder, list(FAMILIES))
        self.family = FAMILIES[self.model_type]
        self.settings = image_settings(folder)
        self.mean, self.std = mean_and_std(self.settings)
        self.model = self._load_model()
        self.labels = {int(i): label for i, label in (self.model.config.id2label or {}).items()}
        self.tokenizer = self._load_tokenizer() if self.family.text else None

    def _load_model(self):
        from transformers import AutoModelForObjectDetection, AutoModelForZeroShotObjectDetection

        auto = AutoModelForZeroShotObjectDetection if self.family.text else AutoModelForObjectDetection
        model, report = auto.from_pretrained(self.folder, output_loading_info=True, dtype="float32")
        if report["missing_keys"]:
            some = ", ".join(sorted(report["missing_keys"])[:3])
            raise ExportError(f"{self.folder}: the weights lack {len(report['missing_keys'])} tensors, such as {some}")
        return model.eval()

    def _load_tokenizer(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError) as e:
            raise ExportError(f"{self.folder}: {self.model_type} needs its tokenizer's files ({e})") from e

    @property
    def fixed_size(self) -> tuple[int, int]:
        """width, height of a detector with one size."""
        if self.family.text:
            side = self.model.config.vision_config.image_size
            return side, side
        size = self.settings.get("size")
        if not isinstance(size, dict) or not {"height", "width"} <= size.keys():
            raise ExportError(f"{self.model_type} needs size: height and width in its processor's settings, not {size}")
        return size["width"], size["height"]

    def tracing(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def __call__(self, *inputs):
        """By position, in the order of `signature().inputs`."""
        import torch

        named = dict(zip(self.signature().inputs, inputs))
        if self.family.pixel_mask:
            named["pixel_mask"] = named["pixel_mask"].to(torch.long)
        outputs = self.model(**named, return_dict=True)
        return {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}

    def signature(self) -> Signature:
        pixels = {0: "batch_size"} | ({2: "height", 3: "width"} if self.family.free_size else {})
        inputs = {"pixel_values": pixels}
        if self.family.pixel_mask:
            inputs["pixel_mask"] = {0: "batch_size", 1: "height", 2: "width"}
        if self.family.text:
            text = {0: "text_batch_size"}
            inputs = {"input_ids": text, "pixel_values": pixels, "attention_mask": text}
        outputs = {"logits": {0: "batch_size"}, "pred_boxes": {0: "batch_size"}}
        if self.family.text:
            outputs["logits"][2] = "num_queries"
        return Signature(inputs, outputs)

    def feed(self, pixels: np.ndarray, prompts: list[str] | None = None, mask: np.ndarray | None = None) -> Feed:
        """pixels [batch, 3, h, w]; one prompt per image ("a cat. a dog."), all with as many labels."""
        if self.family.text:
            texts = [label for prompt in prompts or [PROMPT] * len(pixels) for label in labels_of(prompt)]
            text = self.text_feed(texts)
            return {"input_ids": text["input_ids"], "pixel_values": pixels, "attention_mask": text["attention_mask"]}
        if not self.family.pixel_mask:
            return {"pixel_values": pixels}
        ones = np.ones((len(pixels), *pixels.shape[2:]), np.int64)
        return {"pixel_values": pixels, "pixel_mask": ones if mask is None else mask}

    def text_feed(self, texts: list[str]) -> Feed:
        encoded = self.tokenizer(texts, padding="max_length", max_length=TEXT_LENGTH, truncation=True)
        return {key: np.array(encoded[key], np.int64) for key in ("input_ids", "attention_mask")}

    def detections(self, logits: np.ndarray, boxes: np.ndarray, prompt: str | None) -> list[dict]:
        """The best of one image by score, one label per query; boxes cx cy w h in 0..1."""
        scores = softmax(logits)[:, :-1] if self.family.softmax else sigmoid(logits)
        names = labels_of(prompt) if self.family.text else self.labels
        order = np.argsort(-scores.max(axis=1), kind="stable")[:DETECTIONS_KEPT]
        return [
            {
                "label": names[int(scores[i].argmax())],
                "score": rounded(float(scores[i].max())),
                "box": rounded(boxes[i].astype(float)),
            }
            for i in order
        ]


def labels_of(prompt: str) -> list[str]:
    """
    >>> labels_of("a cat. a dog.")
    ['a cat', 'a dog']
    """
    return [label.strip() for label in prompt.split(".") if label.strip()]


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64) - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def batch_of_patterns(detector: Detector, size: tuple[int, int], count: int) -> np.ndarray:
    """The pattern, then the pattern turned and mirrored: images of one batch must differ."""
    pattern = pattern_tensor(*size, detector.mean, detector.std)
    turned = [pattern, pattern[:, ::-1], pattern[:, :, ::-1], pattern[:, ::-1, ::-1]]
    return np.ascontiguousarray(np.stack([turned[i % 4] for i in range(count)]))


def checked_feeds(detector: Detector) -> list[Feed]:
    """Several sizes, batches of 1 to 4, other texts, and a batch with padding where there is a mask."""
    family = detector.family
    sizes = CHECKED_SIZES if family.free_size else [detector.fixed_size]
    feeds = [detector.feed(batch_of_patterns(detector, size, count)) for size in sizes for count in (1, 3)]
    if family.text:
        one, four = (batch_of_patterns(detector, sizes[0], count) for count in (1, 4))
        feeds += [detector.feed(one, [prompt]) for prompt in OTHER_PROMPTS]
        feeds.append(detector.feed(four, [PROMPT, "a tree. a red bus.", PROMPT, "a person. a small house."]))
    if family.pixel_mask:
        pixels = batch_of_patterns(detector, sizes[0], 2)
        width, height = sizes[0]
        mask = np.ones((2, height, width), np.int64)
        mask[1, :, width * 2 // 3 :] = 0
        pixels[1, :, :, width * 2 // 3 :] = 0
        feeds.append(detector.feed(pixels, mask=mask))
    return feeds


def differences_of_sets(
    expected: dict[str, np.ndarray], got: dict[str, np.ndarray], spared_share: float = SELECTED_QUERIES_MAY_DIFFER
) -> dict[str, float]:
    """For queries in any order: each of PyTorch's has to be there; a few at the end of the ranking may be others."""
    if any(values.shape != got[name].shape or not np.isfinite(got[name]).all() for name, values in expected.items()):
        return {name: float("inf") for name in expected}
    found: dict[str, list[float]] = {name: [] for name in expected}
    for image in range(len(expected["logits"])):
        pairs = {n: np.abs(v[image][:, None] - got[n][image][None]).max(-1) for n, v in expected.items()}
        nearest = (pairs["logits"] + pairs["pred_boxes"]).argmin(axis=1)
        for name, values in pairs.items():
            found[name] += values[np.arange(len(nearest)), nearest].tolist()
    spared = int(spared_share * len(found["logits"]))
    return {name: sorted(values)[-1 - spared] for name, values in found.items()}


def reference_cases(detector: Detector) -> list[dict]:
    cases = []
    for size in REFERENCE_SIZES if detector.family.free_size else [detector.fixed_size]:
        outputs = run_torch(detector, detector.feed(batch_of_patterns(detector, size, 1)))
        prompt = PROMPT if detector.family.text else None
        case = {"width_px": size[0], "height_px": size[1]} | ({"prompt": prompt} if prompt else {})
        case["detections"] = detector.detections(outputs["logits"][0], outputs["pred_boxes"][0], prompt)
        cases.append(case)
    return cases


def export(model_dir: Path, out_dir: Path) -> tuple[Detector, Differences]:
    """Writes `out_dir` and says how far the graph is from PyTorch."""
    detector = Detector(model_dir)
    part = out_dir / "model.part.onnx"
    try:
        size = TRACED_SIZE if detector.family.free_size else detector.fixed_size
        # Two images and padded text: a dimension of 1 would be taken for a constant.
        export_graph(detector, detector.feed(batch_of_patterns(detector, size, 2)), detector.signature(), part)
        compare = differences_of_sets if detector.family.selects_queries else largest_differences
        differences = require_equal(detector, part, checked_feeds(detector), TOLERANCES, compare)
        copy_settings(model_dir, out_dir)
        write_reference(out_dir, "detector", detector.mean, detector.std, reference_cases(detector))
        part.replace(out_dir / "model.onnx")
    finally:
        part.unlink(missing_ok=True)
    return detector, differences


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a Hugging Face detector for croprow.")
    parser.add_argument("model_dir", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("out_dir", type=Path, help="folder to write")
    args = parser.parse_args()
    try:
        detector, differences = export(args.model_dir, args.out_dir)
    except ExportError as e:
        sys.exit(f"error: {e}")
    graph = args.out_dir / "model.onnx"
    print(f"{graph}: {detector.model_type}, {graph.stat().st_size / 1e6:.1f} MB; {differences}")


if __name__ == "__main__":
    main()
