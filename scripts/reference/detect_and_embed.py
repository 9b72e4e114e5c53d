"""The whole of croprow's work on the demo photos, in plain Python: what the Rust result must equal.

Per photo: letterbox to 416 -> YOLOv3-tiny -> score above 0.3 -> back to photo pixels, clipped -> class-aware
suppression at IoU 0.45 -> crop -> 224 x 224 -> EfficientNet-Lite0 -> vector of length 1.

Needs scripts/fetch-demo.sh first, and Python 3.11 with requirements.txt:

    python3 -m venv .demo/venv-reference
    .demo/venv-reference/bin/pip install -r scripts/reference/requirements.txt
    .demo/venv-reference/bin/python scripts/reference/detect_and_embed.py

Writes tests/data/reference/photos.json. Boxes are photo pixels x0 y0 x1 y1; vectors are little-endian f16.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import tomllib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

from detections import Detections, above, clipped, decode_v5, decode_v8, intersection_over_union, suppressed
from preprocessing import PAD_GREY, letterboxed_tensor, normalised_tensor, open_upright_rgb, squashed_crop, unit_length
from reference_file import write_json

PROJECT = Path(__file__).resolve().parents[2]
DEMO = PROJECT / ".demo"
DETECTOR = DEMO / "models/yolov3-tiny/model.onnx"
DETECTOR_V5 = DEMO / "models/yolov3-tiny-v5/model.onnx"
EMBEDDER = DEMO / "models/efficientnet-lite0/model.onnx"

PHOTO_COUNT = 15
INPUT_SIDE_PX = 416
SCORE_THRESHOLD = 0.3
IOU_LIMIT = 0.45

# What other implementations of YOLOv3-tiny find in bus.jpg, clipped to the photo.
BUS_PHOTO_SEEN = [
    ("person", [46, 407, 210, 891]),
    ("person", [685, 485, 810, 883]),
    ("person", [217, 446, 390, 779]),
    ("bus", [0, 234, 810, 736]),
]


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def open_session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


class Reference:
    """Both models and the settings beside them."""

    def __init__(self) -> None:
        self.detector = open_session(DETECTOR)
        self.detector_v5 = open_session(DETECTOR_V5)
        self.embedder = open_session(EMBEDDER)
        metadata = self.detector.get_modelmeta().custom_metadata_map
        self.names: dict[int, str] = ast.literal_eval(metadata["names"])
        self.embedder_settings = tomllib.loads(EMBEDDER.with_name("croprow.toml").read_text())

    def detect(self, image: Image.Image) -> tuple[Detections, dict]:
        """Detections in photo pixels, best first, and the letterbox they came through."""
        tensor, fit = letterboxed_tensor(image, INPUT_SIDE_PX)
        feed = {"images": tensor[None]}
        raw = decode_v8(self.detector.run(["output0"], feed)[0][0])
        self._require_same(raw, decode_v5(self.detector_v5.run(["output0"], feed)[0][0]))
        found = above(raw, SCORE_THRESHOLD)
        found = Detections(fit.boxes_to_photo(found.boxes.astype(np.float64)), found.scores, found.classes)
        return suppressed(clipped(found, *image.size), IOU_LIMIT), asdict(fit)

    @staticmethod
    def _require_same(v8: Detections, v5: Detections) -> None:
        np.testing.assert_allclose(v8.boxes, v5.boxes, atol=1e-3)
        np.testing.assert_allclose(v8.scores, v5.scores, atol=1e-5)

    def embed(self, image: Image.Image, boxes: np.ndarray) -> np.ndarray:
        """[n, 1280], each of length 1."""
        rules = self.embedder_settings["input"]
        crops = [squashed_crop(image, box, rules["width"], rules["height"]) for box in boxes]
        batch = np.stack([normalised_tensor(crop, rules["mean"], rules["std"]) for crop in crops])
        output = self.embedder_settings["embedder"]["output"]
        return unit_length(self.embedder.run([output], {rules["name"]: batch})[0])

    def photo(self, path: Path) -> tuple[dict, np.ndarray]:
        image = open_upright_rgb(path)
        found, fit = self.detect(image)
        vectors = self.embed(image, found.boxes) if len(found) else np.zeros((0, 1280), np.float32)
        record = {
            "file": path.name,
            "sha256": sha256_of(path),
            "width": image.width,
            "height": image.height,
            "letterbox": fit,
            "detections": [
                {
                    "label": self.names[int(found.classes[i])],
                    "class_index": int(found.classes[i]),
                    "score": round(float(found.scores[i]), 6),
                    "box": [round(float(x), 3) for x in found.boxes[i]],
                    "vector_f16_base64": base64.b64encode(vectors[i].astype("<f2").tobytes()).decode(),
                }
                for i in range(len(found))
            ],
        }
        return record, vectors


def require_bus_photo(photos: list[dict]) -> None:
    """Fails unless bus.jpg shows what other implementations see in it."""
    detections = next(photo for photo in photos if photo["file"] == "bus.jpg")["detections"]
    for label, box in BUS_PHOTO_SEEN:
        same_label = np.array([d["box"] for d in detections if d["label"] == label])
        if intersection_over_union(np.array(box), same_label).max() < 0.9:
            raise SystemExit(f"bus.jpg: no {label} at {box}; found {detections}")
    if len(detections) != len(BUS_PHOTO_SEEN):
        raise SystemExit(f"bus.jpg: {len(detections)} detections, expected {len(BUS_PHOTO_SEEN)}")


def neighbours_of_own_class(labels: list[str], vectors: np.ndarray) -> tuple[int, int]:
    """Crops whose nearest neighbour has their class, and crops that have a partner of their class at all."""
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    nearest = [labels[i] for i in similarity.argmax(axis=1)]
    with_partner = [i for i, label in enumerate(labels) if labels.count(label) > 1]
    return sum(nearest[i] == labels[i] for i in with_partner), len(with_partner)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the reference results for the demo photos.")
    parser.add_argument("--photos", type=Path, default=DEMO / "photos")
    parser.add_argument("--out", type=Path, default=PROJECT / "tests/data/reference/photos.json")
    args = parser.parse_args()
    paths = sorted(args.photos.iterdir())
    if len(paths) != PHOTO_COUNT:
        raise SystemExit(f"{args.photos} holds {len(paths)} files, not {PHOTO_COUNT}: run scripts/fetch-demo.sh")

    reference = Reference()
    results = [reference.photo(path) for path in paths]
    photos = [record for record, _ in results]
    require_bus_photo(photos)

    content = {
        "models": {
            "detector_sha256": sha256_of(DETECTOR),
            "detector_v5_sha256": sha256_of(DETECTOR_V5),
            "embedder_sha256": sha256_of(EMBEDDER),
        },
        "settings": {
            "input_side_px": INPUT_SIDE_PX,
            "pad_grey": PAD_GREY,
            "detector_resize": "bilinear",
            "score_threshold": SCORE_THRESHOLD,
            "iou_limit": IOU_LIMIT,
            "class_aware": True,
            "embedder_input": reference.embedder_settings["input"],
        },
        "made_with": {"onnxruntime": onnxruntime.__version__, "pillow": Image.__version__, "numpy": np.__version__},
        "photos": photos,
    }
    write_json(args.out, content)

    labels = [d["label"] for photo in photos for d in photo["detections"]]
    own, with_partner = neighbours_of_own_class(labels, np.concatenate([vectors for _, vectors in results]))
    for photo in photos:
        found = ", ".join(f"{d['label']} {d['score']:.2f}" for d in photo["detections"])
        print(f"{photo['file']:22} {photo['width']:4} x {photo['height']:4}  {found or 'nothing'}")
    print(f"{len(labels)} regions; {own} of {with_partner} crops with a partner have one of their class nearest")
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
