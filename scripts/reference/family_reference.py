"""What Hugging Face gives for the golden pictures: pixels, outputs and results of one model, and how much they hang
on the picture being read rightly."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchvision.transforms.v2.functional as tvF
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "scripts/models"))
from export_detector import Detector, differences_of_sets, labels_of, sigmoid, softmax  # noqa: E402
from export_embedder import FAMILIES, Embedder  # noqa: E402
from hf_folder import image_settings, mean_and_std, normalised, read_json, rounded  # noqa: E402
from torch_export import largest_differences, open_session, run_graph, run_torch  # noqa: E402

PICTURES = ("02_china_640x427", "06_grey_camera", "09_tall_200x1200")

# The families whose input is no uint8 picture: these resize floating-point numbers.
FLOAT_INPUT = ("owlv2", "dinov3_vit")
PIXELS_EQUAL = 1e-6
# What a test may allow; a wrong input has to move the outputs further than this.
TOLERANCE = {"score": 1e-3, "box": 1e-4, "cosine": 0.9995}
BATCH_EQUAL = 1e-4
GRAPH_EQUAL = {"logits": 1e-3, "pred_boxes": 1e-4}

DETECTIONS_WANTED = range(3, 16)
THRESHOLDS = [round(0.1 + 0.025 * i, 3) for i in range(33)]
# No score may lie nearer to the threshold than this.
THRESHOLD_MARGIN = 0.004
# Neighbours in the encoder's ranking must be further apart than any difference in rounding.
TOPK_GAP = 1e-4


@dataclass(frozen=True)
class Picture:
    name: str
    path: Path
    image: Image.Image

    @staticmethod
    def open(folder: Path, name: str) -> "Picture":
        found = sorted(folder.glob(f"{name}.*"))
        if len(found) != 1:
            raise SystemExit(f"{folder} holds {len(found)} files named {name}")
        return Picture(name, found[0], ImageOps.exif_transpose(Image.open(found[0])).convert("RGB"))


def pictures(folder: Path) -> list[Picture]:
    return [Picture.open(folder, name) for name in PICTURES]


class Reader:
    """The image processor of a folder, as it is and with the faults that a port can have."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.pillow = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def read(self, image: Image.Image) -> np.ndarray:
        """f32 [3, h, w]."""
        return self.processor(images=image, return_tensors="pt")["pixel_values"][0].numpy()

    def read_swapped(self, image: Image.Image) -> np.ndarray:
        """Blue for red."""
        return self.read(Image.fromarray(np.ascontiguousarray(np.asarray(image)[..., ::-1])))

    def read_aliased(self, image: Image.Image) -> np.ndarray:
        """Without the low-pass filter when it is made smaller."""
        with without_antialias():
            return self.read(image)

    def read_by_pillow(self, image: Image.Image) -> np.ndarray:
        """With transformers' processor that uses Pillow: differs by a grey level at most."""
        return np.asarray(self.pillow(images=image, return_tensors="np")["pixel_values"][0])


@contextlib.contextmanager
def without_antialias() -> Iterator[None]:
    resize, blur = tvF.resize, tvF.gaussian_blur
    tvF.resize = lambda *args, **kwargs: resize(*args, **{**kwargs, "antialias": False})
    tvF.gaussian_blur = lambda image, *_args, **_kwargs: image
    try:
        yield
    finally:
        tvF.resize, tvF.gaussian_blur = resize, blur


def save_pixels(tensor: np.ndarray, model: Detector | Embedder, picture: str, folder: Path) -> str:
    """Writes the input as the uint8 picture it was, or as it is; gives the file's name. Equal pixels share a file."""
    height, width = tensor.shape[1:]
    stem = f"{picture}-{width}x{height}"
    if model.model_type in FLOAT_INPUT:
        content = tensor.astype("<f4").tobytes()
        name = f"{stem}-{hashlib.sha256(content).hexdigest()[:8]}.f32"
        (folder / name).write_bytes(content)
        return name
    mean, std = np.array(model.mean)[:, None, None], np.array(model.std)[:, None, None]
    pixels = np.round((tensor * std + mean) * 255).astype(np.uint8).transpose(1, 2, 0)
    if not np.abs(normalised(pixels, model.mean, model.std) - tensor).max() <= PIXELS_EQUAL:
        raise SystemExit(f"{model.model_type}: the input of {picture} is no uint8 picture")
    name = f"{stem}-{hashlib.sha256(pixels.tobytes()).hexdigest()[:8]}.webp"
    Image.fromarray(pixels).save(folder / name, lossless=True, quality=100, method=6)
    if not np.array_equal(np.asarray(Image.open(folder / name).convert("RGB")), pixels):
        raise SystemExit(f"{name} does not hold the pixels it was given")
    return name


def header(picture: Picture, tensor: np.ndarray, model: Detector | Embedder, pixel_folder: Path) -> dict[str, Any]:
    pixels = save_pixels(tensor, model, picture.name, pixel_folder)
    return {
        "file": f"tests/data/golden/pictures/{picture.path.name}",
        "upright": list(picture.image.size),
        "tensor": [tensor.shape[2], tensor.shape[1]],
        "pixels": pixels,
    }


def dimensions_of(session) -> dict[str, list]:
    """Inputs and outputs of a graph; names are free dimensions."""
    return {value.name: list(value.shape) for value in [*session.get_inputs(), *session.get_outputs()]}


def groups_of_equal_size(tensors: dict[str, np.ndarray]) -> list[list[str]]:
    sizes: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        sizes.setdefault(tensor.shape, []).append(name)
    return [names for names in sizes.values() if len(names) > 1]


def batch_case(model, session, tensors: dict[str, np.ndarray], prompt: dict[str, str]) -> dict[str, Any]:
    """Pictures of one size together, or else the first one before its mirror image: each as if it were alone."""
    groups = groups_of_equal_size(tensors)
    if groups:
        names = groups[0]
        batch = np.stack([tensors[name] for name in names])
    else:
        names = [PICTURES[0], f"{PICTURES[0]} mirrored"]
        batch = np.ascontiguousarray(np.stack([tensors[PICTURES[0]], tensors[PICTURES[0]][:, :, ::-1]]))
    feed = feed_of(model, batch, prompt)
    differences: dict[str, float] = {}
    for outputs in (run_torch(model, feed), run_graph(session, feed)):
        for i in range(len(batch)):
            alone = run_torch(model, feed_of(model, batch[i : i + 1], prompt))
            together = {name: values[i : i + 1] for name, values in outputs.items() if per_image(name)}
            for name, value in largest_differences({n: alone[n] for n in together}, together).items():
                differences[name] = max(value, differences.get(name, 0.0))
    largest = max(np.abs(values).max() for values in alone.values())
    if max(differences.values()) > BATCH_EQUAL * max(1.0, largest):
        raise SystemExit(f"{model.model_type}: results in a batch differ from single ones: {differences}")
    return {"pictures": names, "largest_difference_to_single": rounded(differences)}


def per_image(output: str) -> bool:
    return output not in ("logits_per_text", "text_embeds")


def feed_of(model, pixels: np.ndarray, prompt: dict[str, str]) -> dict[str, np.ndarray]:
    if isinstance(model, Detector) and prompt:
        return model.feed(pixels, [prompt["prompt"]] * len(pixels))
    return model.feed(pixels)


# --- Detectors ---


def scores_of(model: Detector, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs with probabilities instead of logits."""
    logits = outputs["logits"]
    scores = softmax(logits)[..., :-1] if model.family.softmax else sigmoid(logits)
    return {"logits": scores, "pred_boxes": outputs["pred_boxes"]}


def detections(
    reader: Reader, outputs: dict[str, np.ndarray], threshold: float, size: tuple[int, int], labels: Any
) -> list[dict]:
    """Of one image, best score first. `size`: width, height. `labels`: by number."""
    tensors = SimpleNamespace(**{name: torch.from_numpy(values) for name, values in outputs.items()})
    target = torch.tensor([[size[1], size[0]]])
    found = reader.processor.post_process_object_detection(tensors, threshold=threshold, target_sizes=target)[0]
    order = found["scores"].argsort(descending=True, stable=True)
    return [
        {
            "label": labels[int(found["labels"][i])],
            "score": rounded(float(found["scores"][i])),
            "box": rounded([float(x) for x in found["boxes"][i]]),
        }
        for i in order
    ]


def choose_threshold(found: dict[str, list[dict]]) -> tuple[float, float]:
    """Between 3 and 15 detections in every picture, and no score near the threshold."""
    best = (0.0, 0.0)
    for threshold in THRESHOLDS:
        counts = [sum(d["score"] > threshold for d in of_picture) for of_picture in found.values()]
        margin = min(abs(d["score"] - threshold) for of_picture in found.values() for d in of_picture)
        if all(count in DETECTIONS_WANTED for count in counts) and margin > best[1]:
            best = (threshold, margin)
    if best[1] < THRESHOLD_MARGIN:
        raise SystemExit(f"no threshold gives 3 to 15 detections in each picture: try another seed ({best})")
    return best


def topk_gap(model: Detector, tensors: dict[str, np.ndarray]) -> float:
    """Smallest distance between neighbours in the encoder's ranking of the chosen queries and the first not chosen."""
    gaps = []
    for tensor in tensors.values():
        with torch.no_grad():
            ranked = model.model(torch.from_numpy(tensor[None])).enc_outputs_class.max(-1).values[0]
        top = ranked.sort(descending=True).values[: model.model.config.num_queries + 1]
        gaps.append(float((top[:-1] - top[1:]).min()))
    return min(gaps)


def detector_reaction(model: Detector, reader: Reader, picture: Picture, prompt: dict[str, str], fault: str) -> dict:
    """How far score and box of the queries move; queries are matched to the most alike, so this is the least."""
    right, wrong = (
        scores_of(model, run_torch(model, feed_of(model, tensor[None], prompt)))
        for tensor in (reader.read(picture.image), getattr(reader, fault)(picture.image))
    )
    if right["logits"].shape != wrong["logits"].shape:
        return {"score": 1.0, "box": 1.0}
    moved = differences_of_sets(right, wrong, spared_share=0)
    return {"score": moved["logits"], "box": moved["pred_boxes"]}


def prompt_reference(model: Detector, labels: list[str]) -> dict[str, Any]:
    return {"prompt": labels, "input_ids": model.text_feed(labels)["input_ids"].tolist()}


def detector_reference(
    folder: Path, graph: Path, photos: list[Picture], pixel_folder: Path, prompt: str | None
) -> dict[str, Any]:
    """`folder`: with weights; `graph`: the exported model.onnx."""
    model, reader, session = Detector(folder), Reader(folder), open_session(graph)
    prompts = {"prompt": prompt} if prompt else {}
    labels = labels_of(prompt) if prompt else model.labels
    tensors = {picture.name: reader.read(picture.image) for picture in photos}
    outputs = {name: run_torch(model, feed_of(model, tensor[None], prompts)) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        compare = differences_of_sets if model.family.selects_queries else largest_differences
        moved = compare(outputs[name], run_graph(session, feed_of(model, tensor[None], prompts)))
        if any(value > GRAPH_EQUAL[key] for key, value in moved.items()):
            raise SystemExit(f"{model.model_type}: the graph differs from PyTorch on {name}: {moved}")
    all_found = {p.name: detections(reader, outputs[p.name], 0.0, p.image.size, labels) for p in photos}
    threshold, margin = choose_threshold(all_found)
    content: dict[str, Any] = {
        "kind": "detector",
        "model": graph.parent.name,
        "model_type": model.model_type,
        "activation": "softmax, last class is no object" if model.family.softmax else "sigmoid",
        "graph": dimensions_of(session),
        "mean": model.mean,
        "std": model.std,
        "threshold": threshold,
        "threshold_margin": rounded(margin),
    }
    if model.family.selects_queries:
        content["topk_gap"] = rounded(topk_gap(model, tensors))
        if content["topk_gap"] < TOPK_GAP:
            raise SystemExit(f"{model.model_type}: queries nearly tie ({content['topk_gap']}): try another seed")
    content["reaction"] = reactions(detector_reaction, model, reader, photos, prompts)
    content["batch"] = batch_case(model, session, tensors, prompts)
    content["pictures"] = [
        {
            **header(picture, tensors[picture.name], model, pixel_folder),
            **(prompt_reference(model, labels) if prompt else {}),
            "logits": rounded(outputs[picture.name]["logits"][0].astype(float)),
            "pred_boxes": rounded(outputs[picture.name]["pred_boxes"][0].astype(float)),
            "detections": detections(reader, outputs[picture.name], threshold, picture.image.size, labels),
        }
        for picture in photos
    ]
    return content


# --- Embedders ---


def embedder_reaction(
    model: Embedder | CommittedGraph, reader: Reader, picture: Picture, _prompt: dict[str, str], fault: str
) -> dict[str, float]:
    right, wrong = (
        model.vectors(run_torch(model, model.feed(tensor[None])))[0]
        for tensor in (reader.read(picture.image), getattr(reader, fault)(picture.image))
    )
    return {"cosine": float(right @ wrong / np.linalg.norm(right) / np.linalg.norm(wrong))}


class CommittedGraph:
    """An embedder of which only the graph is at hand: fed and read as an `Embedder`."""

    def __init__(self, folder: Path) -> None:
        self.model_type = read_json(folder / "config.json")["model_type"]
        self.family = FAMILIES[self.model_type]
        self.mean, self.std = mean_and_std(image_settings(folder))
        self.session = open_session(folder / "model.onnx")

    def __call__(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = run_graph(self.session, self.feed(pixels.numpy()))
        return {name: torch.from_numpy(values) for name, values in outputs.items()}

    def feed(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"pixel_values": pixels}

    vectors = Embedder.vectors


def embedder_reference(
    model: Embedder | CommittedGraph, folder: Path, photos: list[Picture], pixel_folder: Path
) -> dict[str, Any]:
    """`folder`: the exported one."""
    graph = folder / "model.onnx"
    reader, session = Reader(folder), open_session(graph)
    tensors = {picture.name: reader.read(picture.image) for picture in photos}
    outputs = {name: run_torch(model, model.feed(tensor[None])) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        moved = largest_differences(outputs[name], run_graph(session, model.feed(tensor[None])))
        if any(value > 1e-4 * max(1.0, np.abs(outputs[name][key]).max()) for key, value in moved.items()):
            raise SystemExit(f"{model.model_type}: the graph differs from PyTorch on {name}: {moved}")
    return {
        "kind": "embedder",
        "model": graph.parent.name,
        "model_type": model.model_type,
        "graph": dimensions_of(session),
        "mean": model.mean,
        "std": model.std,
        "vector_source": model.family.vector,
        "reaction": reactions(embedder_reaction, model, reader, photos, {}),
        "batch": batch_case(model, session, tensors, {}),
        "pictures": [
            {
                **header(picture, tensors[picture.name], model, pixel_folder),
                "vector": rounded(model.vectors(outputs[picture.name])[0].astype(float)),
            }
            for picture in photos
        ],
    }


# --- Both ---


def reactions(measure, model, reader: Reader, photos: list[Picture], prompt: dict[str, str]) -> dict[str, dict]:
    """How far each fault moves the results of the picture that shows it best; and how far a resize that is right, but
    by Pillow, does. Raises where a fault would pass the tests on all pictures.
    """
    faults = {"blue_for_red": "read_swapped", "no_antialias": "read_aliased", "pillow_resize": "read_by_pillow"}
    result: dict[str, dict[str, float]] = {}
    for fault, read in faults.items():
        moved = [measure(model, reader, picture, prompt, read) for picture in photos]
        result[fault] = {key: (min if key == "cosine" else max)(each[key] for each in moved) for key in moved[0]}
    for fault in ("blue_for_red", "no_antialias"):
        for key, value in result[fault].items():
            if value >= TOLERANCE[key] if key == "cosine" else value <= TOLERANCE[key]:
                raise SystemExit(f"{model.model_type}: {fault} moves {key} by {value} only: try another seed")
    return rounded(result)
