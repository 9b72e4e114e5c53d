"""Make the tiny ONNX models of the adapter tests, and write down what ONNX Runtime says of them.

Writes tests/data/models/<name>/model.onnx (a few KB each) and tests/data/reference/tiny.json. Same seed, same
bytes. Python and packages: as for detect_and_embed.py.

  tiny-tokens            pixel_values [batch, 3, 28, 28] -> last_hidden_state [batch, 5, 8] (CLS, then 2 x 2
                         patches by rows), pooler_output [batch, 8]; with a Hugging Face preprocessor_config.json
  yolo-v8-tiny           images [batch, 3, 32, 32] -> output0 [batch, 6, 12]    cx cy w h, red, green
  yolo-v5-tiny           images [batch, 3, 32, 32] -> output0 [batch, 12, 7]    cx cy w h, objectness, red, green
  yolo-end2end-tiny      images [batch, 3, 32, 32] -> output0 [batch, 10, 6]    x0 y0 x1 y1, score, class
  yolo-fixed-batch1-tiny as yolo-v8-tiny, but the batch is always 1
  yolo-nan-tiny          as yolo-v8-tiny, but all scores are NaN for an image that is black everywhere

The boxes of the YOLO graphs are constants, in input pixels. A score is a weight times the mean of its class's
channel; objectness is half the mean of all channels plus a half. So a score can be worked out by hand.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto
from PIL import Image

from detections import Detections, above, decode_end2end, decode_v5, decode_v8, suppressed
from preprocessing import letterboxed_tensor, normalised_tensor, shortest_edge_center_crop
from reference_file import write_json

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "scripts/models"))
from onnx_graph import GraphWriter  # noqa: E402

SEED = 20
YOLO_SIDE_PX = 32
SCORE_THRESHOLD = 0.3
IOU_LIMIT = 0.45
SIZE_LIMIT_BYTES = 20_000

# cx, cy, w, h in input pixels; weight of red; weight of green.
ANCHORS = np.array(
    [
        [8.0, 8.0, 10.0, 10.0, 0.90, 0.10],
        [8.5, 8.25, 10.0, 10.0, 0.80, 0.05],  # over the one before, same class: suppressed
        [22.0, 8.0, 8.0, 12.0, 0.10, 0.85],
        [22.0, 8.5, 8.0, 12.0, 0.70, 0.20],  # over the one before, other class where both colours are strong
        [8.0, 24.0, 12.0, 8.0, 0.60, 0.00],
        [24.0, 24.0, 10.0, 10.0, 0.05, 0.50],
        [16.0, 16.0, 30.0, 30.0, 0.35, 0.32],
        [2.0, 2.0, 8.0, 8.0, 0.40, 0.10],  # reaches beyond the left and the top edge
        [28.0, 4.0, 2.0, 2.0, 0.02, 0.02],
        [28.0, 28.0, 2.0, 2.0, 0.02, 0.01],
        [4.0, 28.0, 2.0, 2.0, 0.01, 0.02],
        [16.0, 30.0, 2.0, 2.0, 0.00, 0.00],
    ]
)
# x0, y0, x1, y1 in input pixels; weight; class. Two unused rows at the end, as in real exports.
END2END_ROWS = np.array(
    [
        [3.0, 3.0, 13.0, 13.0, 0.90, 0],
        [18.0, 2.0, 26.0, 14.0, 0.85, 1],
        [18.0, 2.5, 26.0, 14.5, 0.70, 0],
        [2.0, 20.0, 14.0, 28.0, 0.60, 0],
        [19.0, 19.0, 29.0, 29.0, 0.50, 1],
        [-2.0, -2.0, 6.0, 6.0, 0.40, 0],
        [1.0, 1.0, 31.0, 31.0, 0.35, 1],
        [15.0, 15.0, 16.0, 16.0, 0.05, 1],
        [0.0, 0.0, 0.0, 0.0, 0.00, 0],
        [0.0, 0.0, 0.0, 0.0, 0.00, 0],
    ]
)


# --- The graphs ---


def yolo_metadata(description: str, end2end: bool = False) -> dict[str, str]:
    metadata = {
        "description": description,
        "task": "detect",
        "stride": "32",
        "batch": "1",
        "imgsz": "[32, 32]",
        "names": "{0: 'red', 1: 'green'}",
    }
    return metadata | {"end2end": "True"} if end2end else metadata


def start_yolo(batch: int | str) -> tuple[GraphWriter, str]:
    """A graph and its value [batch, 3]: the mean of each channel."""
    graph = GraphWriter()
    images = graph.input("images", [batch, 3, YOLO_SIDE_PX, YOLO_SIDE_PX])
    return graph, graph.op("ReduceMean", [images], axes=[2, 3], keepdims=0)


def for_each_image(graph: GraphWriter, means: str, constant: np.ndarray) -> str:
    """`constant` [a, b] as [batch, a, b]."""
    first_only = [graph.ints([0]), graph.ints([1])]
    batch = graph.op("Slice", [graph.op("Shape", [means]), *first_only])
    shape = graph.op("Concat", [batch, graph.ints(constant.shape)], axis=0)
    return graph.op("Expand", [graph.floats(constant[None]), shape])


def class_means(graph: GraphWriter, means: str, classes: np.ndarray) -> str:
    """[batch, 3] to [batch, len(classes)]: class 0 is the red channel, class 1 the green one."""
    return graph.op("Gather", [means, graph.ints(classes)], axis=1)


def build_v8(path: Path, batch: int | str = "batch", nan_when_black: bool = False) -> None:
    graph, means = start_yolo(batch)
    column = graph.op("Unsqueeze", [class_means(graph, means, np.array([0, 1])), graph.ints([2])])
    scores = graph.op("Mul", [column, graph.floats(ANCHORS[:, 4:].T[None])])
    if nan_when_black:
        brightness = graph.op("Unsqueeze", [graph.op("ReduceMean", [means], axes=[1], keepdims=1), graph.ints([2])])
        scores = graph.op("Mul", [scores, graph.op("Div", [brightness, brightness])])
    boxes = for_each_image(graph, means, ANCHORS[:, :4].T)
    value = graph.op("Concat", [boxes, scores], axis=1)
    graph.output("output0", value, [batch, 6, len(ANCHORS)])
    graph.save(path, "yolo_tiny", yolo_metadata("Tiny test graph in the layout of YOLOv8"))


def build_v5(path: Path) -> None:
    graph, means = start_yolo("batch")
    row = graph.op("Unsqueeze", [class_means(graph, means, np.array([0, 1])), graph.ints([1])])
    scores = graph.op("Mul", [row, graph.floats(ANCHORS[:, 4:][None])])
    brightness = graph.op("Unsqueeze", [graph.op("ReduceMean", [means], axes=[1], keepdims=1), graph.ints([2])])
    halves = graph.floats(np.full((1, len(ANCHORS), 1), 0.5))
    objectness = graph.op("Add", [graph.op("Mul", [brightness, halves]), halves])
    boxes = for_each_image(graph, means, ANCHORS[:, :4])
    value = graph.op("Concat", [boxes, objectness, scores], axis=2)
    graph.output("output0", value, ["batch", len(ANCHORS), 7])
    graph.save(path, "yolo_tiny", yolo_metadata("Tiny test graph in the layout of YOLOv5"))


def build_end2end(path: Path) -> None:
    graph, means = start_yolo("batch")
    of_class = class_means(graph, means, END2END_ROWS[:, 5].astype(int))
    scores = graph.op("Unsqueeze", [graph.op("Mul", [of_class, graph.floats(END2END_ROWS[:, 4])]), graph.ints([2])])
    boxes = for_each_image(graph, means, END2END_ROWS[:, :4])
    classes = for_each_image(graph, means, END2END_ROWS[:, 5:])
    value = graph.op("Concat", [boxes, scores, classes], axis=2)
    graph.output("output0", value, ["batch", len(END2END_ROWS), 6])
    graph.save(path, "yolo_tiny", yolo_metadata("Tiny test graph with final boxes", end2end=True))


def build_tokens(path: Path) -> None:
    """Patches by a 14 x 14 convolution; CLS is a mix of the patches' mean and a constant token."""
    random = np.random.default_rng(SEED)
    graph = GraphWriter()
    pixels = graph.input("pixel_values", ["batch", 3, 28, 28])
    # Kept as int8: 4704 weights would take 19 KB as f32.
    kernels_int8 = graph.constant(random.integers(-127, 128, (8, 3, 14, 14), dtype=np.int8))
    kernels = graph.op("Mul", [graph.op("Cast", [kernels_int8], to=TensorProto.FLOAT), graph.floats(1 / 1270)])
    value = graph.op("Conv", [pixels, kernels, graph.floats(random.normal(0, 0.1, 8))], strides=[14, 14])
    value = graph.op("Reshape", [value, graph.ints([0, 8, 4])])
    patches = graph.op("Tanh", [graph.op("Transpose", [value], perm=[0, 2, 1])])

    mean = graph.op("ReduceMean", [patches], axes=[1], keepdims=1)
    mixed = graph.op("MatMul", [mean, graph.floats(random.normal(0, 0.5, (8, 8)))])
    cls_token = graph.op("Add", [mixed, graph.floats(random.normal(0, 0.5, (1, 1, 8)))])
    graph.output("last_hidden_state", graph.op("Concat", [cls_token, patches], axis=1), ["batch", 5, 8])

    flat = graph.op("Squeeze", [cls_token, graph.ints([1])])
    pooled = graph.op("Tanh", [graph.op("MatMul", [flat, graph.floats(random.normal(0, 0.5, (8, 8)))])])
    graph.output("pooler_output", pooled, ["batch", 8])
    graph.save(path, "tiny_tokens")


PREPROCESSOR_CONFIG = {
    "crop_size": {"height": 28, "width": 28},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "BitImageProcessor",
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 32},
}


# --- The images: each can be made again from its description ---


def solid(width: int, height: int, rgb: tuple[int, int, int]) -> tuple[dict, Image.Image]:
    return {"kind": "solid", "width": width, "height": height, "rgb": list(rgb)}, Image.new("RGB", (width, height), rgb)


def gradient(width: int, height: int) -> tuple[dict, Image.Image]:
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([8 * columns % 256, 8 * rows % 256, 4 * (columns + rows) % 256], axis=-1)
    description = {
        "kind": "gradient",
        "width": width,
        "height": height,
        "rule": "r = 8 x mod 256, g = 8 y mod 256, b = 4 (x + y) mod 256",
    }
    return description, Image.fromarray(pixels.astype(np.uint8))


IMAGES = {
    "black": solid(32, 32, (0, 0, 0)),
    "white": solid(32, 32, (255, 255, 255)),
    "red": solid(32, 32, (255, 0, 0)),
    "green": solid(32, 32, (0, 255, 0)),
    "grey": solid(32, 32, (128, 128, 128)),
    "gradient": gradient(32, 32),
    "red_wide": solid(64, 32, (255, 0, 0)),
    "gradient_wide": gradient(64, 48),
    "gradient_tall": gradient(45, 80),
}
YOLO_DECODERS = {
    "yolo-v8-tiny": decode_v8,
    "yolo-v5-tiny": decode_v5,
    "yolo-end2end-tiny": decode_end2end,
    "yolo-fixed-batch1-tiny": decode_v8,
    "yolo-nan-tiny": decode_v8,
}


# --- What ONNX Runtime says ---


def numbers(array: np.ndarray) -> list:
    """Rounded far below any tolerance of a test; NaN as null, because JSON has none."""
    rounded = np.round(array.astype(np.float64), 6)
    return np.where(np.isnan(rounded), None, rounded.astype(object)).tolist()


def run_single_and_batched(session: onnxruntime.InferenceSession, tensors: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Outputs per image, run one by one; where the batch is free, one batch of all has to give the same."""
    name = session.get_inputs()[0].name
    singly = [[out[0] for out in session.run(None, {name: tensor[None]})] for tensor in tensors]
    if session.get_inputs()[0].shape[0] != 1:
        together = session.run(None, {name: np.stack(tensors)})
        for i, outputs in enumerate(singly):
            for alone, batched in zip(outputs, together):
                np.testing.assert_allclose(alone, batched[i], atol=1e-6)
    return singly


def yolo_reference(model: Path, name: str) -> dict:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    prepared = {key: letterboxed_tensor(image, YOLO_SIDE_PX) for key, (_, image) in IMAGES.items()}
    outputs = run_single_and_batched(session, [tensor for tensor, _ in prepared.values()])
    by_image = {}
    for (key, (_, fit)), (raw,) in zip(prepared.items(), outputs):
        if np.isnan(raw).any():
            by_image[key] = {"output0": numbers(raw), "detections": None}
            continue
        found = above(YOLO_DECODERS[name](raw), SCORE_THRESHOLD)
        found = Detections(fit.boxes_to_photo(found.boxes), found.scores, found.classes)
        if name != "yolo-end2end-tiny":
            found = suppressed(found, IOU_LIMIT)
        by_image[key] = {
            "output0": numbers(raw),
            "detections": [
                {"class_index": int(c), "score": numbers(s), "box": numbers(b)}
                for b, s, c in zip(found.boxes, found.scores, found.classes)
            ],
        }
    return by_image


def token_reference(model: Path) -> dict:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    config = PREPROCESSOR_CONFIG
    tensors = []
    for _, image in IMAGES.values():
        crop = shortest_edge_center_crop(image, config["size"]["shortest_edge"], config["crop_size"]["width"])
        tensors.append(normalised_tensor(crop, config["image_mean"], config["image_std"]))
    outputs = run_single_and_batched(session, tensors)
    return {
        key: {
            "pixel_values_f16_base64": base64.b64encode(tensor.astype("<f2").tobytes()).decode(),
            "last_hidden_state": numbers(hidden),
            "pooler_output": numbers(pooled),
        }
        for key, tensor, (hidden, pooled) in zip(IMAGES, tensors, outputs)
    }


def build_all(folder: Path) -> dict[str, Path]:
    builders = {
        "tiny-tokens": build_tokens,
        "yolo-v8-tiny": build_v8,
        "yolo-v5-tiny": build_v5,
        "yolo-end2end-tiny": build_end2end,
        "yolo-fixed-batch1-tiny": lambda path: build_v8(path, batch=1),
        "yolo-nan-tiny": lambda path: build_v8(path, nan_when_black=True),
    }
    paths = {name: folder / name / "model.onnx" for name in builders}
    for name, build in builders.items():
        build(paths[name])
        if paths[name].stat().st_size > SIZE_LIMIT_BYTES:
            raise SystemExit(f"{paths[name]} is too large to commit")
    config = json.dumps(PREPROCESSOR_CONFIG, indent=2) + "\n"
    paths["tiny-tokens"].with_name("preprocessor_config.json").write_text(config)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny test models and their reference outputs.")
    parser.add_argument("--data", type=Path, default=PROJECT / "tests/data")
    data = parser.parse_args().data
    paths = build_all(data / "models")
    content = {
        "note": "Outputs are per image, without the batch axis. YOLO: letterboxed to 32 x 32, detections best first"
        " (end2end: in the graph's order), score above the threshold, boxes x0 y0 x1 y1 in image pixels, not clipped."
        " null stands for NaN.",
        "settings": {"score_threshold": SCORE_THRESHOLD, "iou_limit": IOU_LIMIT, "class_aware": True},
        "made_with": {"onnxruntime": onnxruntime.__version__, "pillow": Image.__version__, "numpy": np.__version__},
        "images": {key: description for key, (description, _) in IMAGES.items()},
        "models": {name: yolo_reference(paths[name], name) for name in YOLO_DECODERS}
        | {"tiny-tokens": token_reference(paths["tiny-tokens"])},
    }
    out = data / "reference/tiny.json"
    write_json(out, content)
    for name, path in paths.items():
        print(f"{name:24} {path.stat().st_size:6} bytes")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
