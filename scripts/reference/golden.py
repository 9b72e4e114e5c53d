"""The golden files of GroundingDINO: what the Python side says of tests/data/golden/pictures, stage by stage.

    .demo/venv-export/bin/python scripts/reference/golden.py OUT_DIR

Environment: scripts/models/requirements-export.txt. Writes, laid out as in tests/data,

    models/grounding-dino-tiny/   the seeded tiny model, exported and verified by export_grounding_dino.py
    golden/pixels/                each picture after the reference's resize, before normalising; lossless WebP
    golden/reference.json         for those pixels: tokens, outputs and detections, one by one, in a padded batch, and
                                  with each picture's sides filled up to multiples of a step

and says how far the numbers are from those in tests/data. They are equal with the pinned packages, but for
rounding. `topk_gap_least` of a picture says how near its kept queries are to a tie.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import (
    BertTokenizer,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessor,
    GroundingDinoProcessor,
)
from transformers.models.grounding_dino.modeling_grounding_dino import GroundingDinoObjectDetectionOutput
from transformers.utils import logging

from tiny_grounding_dino import seeded_model, tiny_config

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "scripts/models"))
from export_grounding_dino import export  # noqa: E402
from grounding_dino_cases import rounded  # noqa: E402
from grounding_dino_check import Answer, Reference  # noqa: E402

COMMITTED = PROJECT / "tests/data"
PICTURES = COMMITTED / "golden/pictures"
MODEL = "models/grounding-dino-tiny"
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
THRESHOLD, TEXT_THRESHOLD = 0.35, 0.30

PROMPTS = {
    "00_cat_portrait.jpg": "a cat. a whisker.",
    "01_rocket_720p.jpg": "a rocket on its pad.",
    "02_china_640x427.jpg": "a building. a tree. a window.",
    "03_flower_exif6.jpg": "a flower.",
    "04_astronaut_exif8.jpg": "a woman. a helmet. a flag.",
    "05_coffee_exif5_444.jpg": "a cup of coffee. a table.",
    "06_grey_camera.jpg": "a man. a camera.",
    "07_cmyk_chelsea.jpg": "a cat.",
    "08_rgba_png.png": "a snake. a logo.",
    "09_tall_200x1200.jpg": "a person. a bus. a wheel. a window. a door.",
    "10_wide_1600x240_prog.jpg": "a man. a tie. a shirt.",
    "11_pal_png16.png": "a rocket. a tower. smoke.",
}
STEP_PX = 64
STEPPED = ["05_coffee_exif5_444.jpg", "06_grey_camera.jpg", "10_wide_1600x240_prog.jpg"]
BATCH = ["00_cat_portrait.jpg", "02_china_640x427.jpg", "06_grey_camera.jpg", "07_cmyk_chelsea.jpg"]


def save_tiny_model(folder: Path) -> None:
    """The seeded model as a Hugging Face folder; the vocabulary is the committed one."""
    seeded_model(tiny_config()).save_pretrained(folder)
    size = {"shortest_edge": 800, "longest_edge": 1333}
    GroundingDinoImageProcessor(size=size, image_mean=MEAN, image_std=STD).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(COMMITTED / MODEL / name, folder / name)


def upright_rgb(path: Path) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


def pixels_of(pixel_values: torch.Tensor) -> np.ndarray:
    """u8 [height, width, 3] that gives exactly these normalised values."""
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    pixels = ((pixel_values * std + mean) * 255).round()
    if ((pixels - mean * 255) / (std * 255) - pixel_values).abs().max() > 1e-6:
        raise SystemExit("the processor's values are not those of whole grey levels")
    return pixels.to(torch.uint8).permute(1, 2, 0).numpy()


def rounded_all(values: np.ndarray) -> list:
    return [rounded_all(value) if np.ndim(value) else rounded(value) for value in values]


class Golden:
    """The model, its processor and the folder that is being written."""

    def __init__(self, folder: Path, out: Path) -> None:
        tokenizer = BertTokenizer.from_pretrained(folder)
        self.processor = GroundingDinoProcessor(GroundingDinoImageProcessor.from_pretrained(folder), tokenizer)
        self.reference = Reference(GroundingDinoForObjectDetection.from_pretrained(folder))
        self.pixels = out / "pixels"
        self.pixels.mkdir(parents=True, exist_ok=True)

    def answer(
        self, images: list[Image.Image], prompts: list[str], step: int = 1
    ) -> tuple[dict[str, np.ndarray], Answer, list]:
        """Inputs, outputs and detections of one batch whose sides are multiples of `step`."""
        tensors = self.processor(images=images, text=prompts, padding=True, return_tensors="pt")
        height, width = tensors["pixel_values"].shape[2:]
        for name in ("pixel_values", "pixel_mask"):
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, -width % step, 0, -height % step))
        inputs = {name: tensor.numpy() for name, tensor in tensors.items()}
        answer = self.reference.run(inputs)
        output = GroundingDinoObjectDetectionOutput(
            logits=torch.from_numpy(answer.logits),
            pred_boxes=torch.from_numpy(answer.boxes),
            input_ids=tensors["input_ids"],
        )
        results = self.processor.post_process_grounded_object_detection(
            output,
            threshold=THRESHOLD,
            text_threshold=TEXT_THRESHOLD,
            target_sizes=[(image.height, image.width) for image in images],
        )
        return inputs, answer, [self.detections(result) for result in results]

    @staticmethod
    def detections(result: dict) -> list[dict]:
        """In the order of the queries; boxes are x0 y0 x1 y1 in pixels of the picture."""
        parts = zip(result["scores"].tolist(), result["boxes"].tolist(), result["text_labels"])
        return [{"score": score, "box": rounded_all(box), "label": label} for score, box, label in parts]

    def picture(self, file: str, prompt: str) -> dict:
        image = upright_rgb(PICTURES / file)
        inputs, answer, (detections,) = self.answer([image], [prompt])
        gap = self.reference.least_gap(answer.queries.shape[1])
        pixels = pixels_of(torch.from_numpy(inputs["pixel_values"][0]))
        name = Path(file).stem
        Image.fromarray(pixels).save(self.pixels / f"{name}.webp", lossless=True, quality=100, method=6)
        return {
            "name": name,
            "file": file,
            "prompt": prompt,
            "upright": list(image.size),
            "tensor": [pixels.shape[1], pixels.shape[0]],
            "threshold": THRESHOLD,
            "text_threshold": TEXT_THRESHOLD,
            "input_ids": inputs["input_ids"][0].tolist(),
            "logits": rounded_all(answer.logits[0][:, : inputs["input_ids"].shape[1]]),
            "pred_boxes": rounded_all(answer.boxes[0]),
            "detections": sorted(detections, key=lambda found: -found["score"]),
            "topk_gap_least": gap,
        }

    def stepped(self, file: str) -> dict:
        """One picture in a tensor that is larger than it; the mask says where it ends."""
        inputs, answer, _ = self.answer([upright_rgb(PICTURES / file)], [PROMPTS[file]], STEP_PX)
        height, width = inputs["pixel_values"].shape[2:]
        return {
            "name": Path(file).stem,
            "prompt": PROMPTS[file],
            "step": STEP_PX,
            "tensor": [width, height],
            "input_ids": inputs["input_ids"][0].tolist(),
            "logits": rounded_all(answer.logits[0][:, : inputs["input_ids"].shape[1]]),
            "pred_boxes": rounded_all(answer.boxes[0]),
            "topk_gap_least": self.reference.least_gap(answer.queries.shape[1]),
        }

    def batch(self, files: list[str]) -> dict:
        prompts = [PROMPTS[file] for file in files]
        inputs, answer, detections = self.answer([upright_rgb(PICTURES / file) for file in files], prompts)
        height, width = inputs["pixel_values"].shape[2:]
        lengths = inputs["attention_mask"].sum(1)
        return {
            "tensor": [width, height],
            "items": [
                {"name": Path(file).stem, "prompt": prompt, "detections": found}
                for file, prompt, found in zip(files, prompts, detections)
            ],
            "input_ids": inputs["input_ids"].tolist(),
            "attention_mask": inputs["attention_mask"].tolist(),
            "logits": [rounded_all(each[:, :length]) for each, length in zip(answer.logits, lengths)],
            "pred_boxes": rounded_all(answer.boxes),
        }


def largest_difference(found: object, expected: object) -> float:
    """Over all numbers of two JSON values; infinite where anything else differs."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return max((largest_difference(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return max(map(largest_difference, found, expected), default=0.0)
    if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        return abs(found - expected)
    return 0.0 if found == expected else float("inf")


def differences(found: dict, expected: dict) -> str:
    """The largest differences by kind: outputs, and detections, whose boxes are pixels of the picture."""
    detections = next((key for key in ("items", "detections") if key in expected), None)
    kinds = {"logits": "logits", "boxes": "pred_boxes"} | ({"detections": detections} if detections else {})
    numbers = [f"{kind} {largest_difference(found[key], expected[key]):.1e}" for kind, key in kinds.items()]
    inputs = all(found[key] == expected[key] for key in ("tensor", "input_ids"))
    return f"inputs {'equal' if inputs else 'DIFFERENT'}; " + ", ".join(numbers)


def compare(out: Path, content: dict) -> None:
    """Says how far the new files are from the committed ones."""
    committed = json.loads((COMMITTED / "golden/reference.json").read_text())
    for found, expected in zip(content["pictures"], committed["pictures"]):
        pixels = [np.asarray(Image.open(each / f"golden/pixels/{found['name']}.webp")) for each in (out, COMMITTED)]
        same = "equal" if np.array_equal(*pixels) else "DIFFERENT"
        print(f"{found['name']:22} pixels {same}, {differences(found, expected)}")
    for found, expected in zip(content["stepped"], committed["stepped"]):
        print(f"{found['name']:22} filled up, {differences(found, expected)}")
    print(f"{'batch':22} {differences(content['batch'], committed['batch'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden files of the tiny GroundingDINO.")
    parser.add_argument("out_dir", type=Path, help="a folder to make, laid out as tests/data")
    out = parser.parse_args().out_dir
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        save_tiny_model(Path(temporary))
        export(Path(temporary), out / MODEL, opset=17)
        golden = Golden(Path(temporary), out / "golden")
        pictures = [golden.picture(file, prompt) for file, prompt in PROMPTS.items()]
        stepped = [golden.stepped(file) for file in STEPPED]
        content = {"pictures": pictures, "batch": golden.batch(BATCH), "stepped": stepped}
    (out / "golden/reference.json").write_text(json.dumps(content, separators=(",", ":")))
    compare(out, content)


if __name__ == "__main__":
    main()
