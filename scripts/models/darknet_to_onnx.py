"""Convert a Darknet YOLOv3 or YOLOv3-tiny model (.cfg, .weights, .names) to ONNX, with numpy and onnx only.

Input    images   f32 [batch, 3, size, size]   RGB, 0 to 1, letterboxed
Output   output0  f32, one of

  --style v8   [batch, 4 + classes, anchors]   cx, cy, w, h in input pixels; objectness x class score
  --style v5   [batch, anchors, 5 + classes]   cx, cy, w, h in input pixels; objectness; class scores

All scores are 0 to 1. The two layouts and the metadata are those that Ultralytics exports, so that a
loader needs no case of its own for these models.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onnx_graph import GraphWriter

# Added to the variance before the root, as OpenCV's Darknet importer does.
BATCH_NORM_EPSILON = 1e-6
LEAKY_SLOPE = 0.1
TINY_ANCHORS = [10, 14, 23, 27, 37, 58, 81, 82, 135, 169, 344, 319]
COCO_CLASSES = 80


@dataclass
class Section:
    """One [block] of a .cfg file."""

    kind: str
    options: dict[str, str] = field(default_factory=dict)

    def int(self, key: str, default: int | None = None) -> int:
        return int(self.options[key]) if default is None else int(self.options.get(key, default))

    def numbers(self, key: str) -> list[float]:
        return [float(x) for x in self.options[key].split(",")]


@dataclass
class Layer:
    """A finished layer: the name of its value, its channels, and its side in cells."""

    value: str
    channels: int
    side: int


class WeightStream:
    """The f32 numbers of a .weights file, taken in the order of the layers."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        major, minor, _revision = np.frombuffer(raw, "<i4", 3)
        # The count of images seen grew from 4 to 8 bytes with format 0.2.
        header_bytes = 20 if major * 10 + minor >= 2 else 16
        self._values = np.frombuffer(raw, "<f4", offset=header_bytes)
        self._taken = 0

    def take(self, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        if self._taken + count > len(self._values):
            raise ValueError("the weights end before the network does: .cfg and .weights do not belong together")
        values = self._values[self._taken : self._taken + count].reshape(shape)
        self._taken += count
        return values

    def require_empty(self) -> None:
        left = len(self._values) - self._taken
        if left:
            raise ValueError(f"{left} weights left over: .cfg and .weights do not belong together")


def parse_cfg(text: str) -> list[Section]:
    sections: list[Section] = []
    for raw_line in text.splitlines():
        line = raw_line.split("#")[0].strip()
        if not line:
            continue
        if line.startswith("["):
            sections.append(Section(line.strip("[]").strip()))
        else:
            key, value = line.split("=", 1)
            sections[-1].options[key.strip()] = value.strip()
    return sections


def mend_tiny_mask(sections: list[Section]) -> bool:
    """Undoes a fault of the published yolov3-tiny.cfg; true if it was there.

    The second head says `mask = 0,1,2`, but the published COCO weights were trained with `1,2,3`
    (pjreddie/darknet#851). Left alone, small boxes come out at about half their size. Weights that were
    trained on other classes with the file as it stands are right with 0,1,2, hence the class count.
    """
    heads = [s for s in sections if s.kind == "yolo"]
    is_published_tiny = (
        len(heads) == 2
        and all(head.numbers("anchors") == TINY_ANCHORS for head in heads)
        and all(head.int("classes") == COCO_CLASSES for head in heads)
    )
    if not is_published_tiny or heads[1].numbers("mask") != [0, 1, 2]:
        return False
    heads[1].options["mask"] = "1,2,3"
    return True


class DarknetConverter:
    """Walks the sections once, writing nodes and taking weights in the same order."""

    def __init__(self, weights: WeightStream, size: int) -> None:
        self.weights = weights
        self.size = size
        self.graph = GraphWriter()
        self.layers: list[Layer] = []
        self.heads: list[str] = []
        self.anchor_count = 0
        self.class_count = 0
        self.stride_max = 1

    def convert(self, sections: list[Section]) -> str:
        """Gives the value [batch, anchors, 5 + classes]."""
        makers = {
            "convolutional": self._convolutional,
            "maxpool": self._maxpool,
            "upsample": self._upsample,
            "route": self._route,
            "shortcut": self._shortcut,
            "yolo": self._yolo,
        }
        current = Layer(self.graph.input("images", ["batch", 3, self.size, self.size]), 3, self.size)
        # The first section, [net], describes training.
        for section in sections[1:]:
            if section.kind not in makers:
                raise ValueError(f"layer [{section.kind}] is not supported")
            current = makers[section.kind](section, current)
            self.layers.append(current)
        self.weights.require_empty()
        return self.graph.op("Concat", self.heads, axis=1)

    def _convolutional(self, section: Section, previous: Layer) -> Layer:
        filters, kernel, stride = (section.int(k) for k in ("filters", "size", "stride"))
        pad = kernel // 2 if section.int("pad", 0) else section.int("padding", 0)
        if section.int("batch_normalize", 0):
            bias, gamma, mean, variance = (self.weights.take(filters).astype(np.float64) for _ in range(4))
            scale = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
            kernel_weights = self.weights.take(filters, previous.channels, kernel, kernel)
            kernel_weights = kernel_weights * scale[:, None, None, None]
            bias = bias - mean * scale
        else:
            bias = self.weights.take(filters)
            kernel_weights = self.weights.take(filters, previous.channels, kernel, kernel)
        value = self.graph.op(
            "Conv",
            [previous.value, self.graph.floats(kernel_weights), self.graph.floats(bias)],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[pad] * 4,
        )
        activation = section.options["activation"]
        if activation == "leaky":
            value = self.graph.op("LeakyRelu", [value], alpha=LEAKY_SLOPE)
        elif activation != "linear":
            raise ValueError(f"activation {activation} is not supported")
        return Layer(value, filters, (previous.side + 2 * pad - kernel) // stride + 1)

    def _maxpool(self, section: Section, previous: Layer) -> Layer:
        kernel, stride = section.int("size"), section.int("stride")
        # Darknet pads size - 1 in all, the odd one at the end.
        before, after = (kernel - 1) // 2, kernel // 2
        value = self.graph.op(
            "MaxPool",
            [previous.value],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
        )
        return Layer(value, previous.channels, (previous.side - 1) // stride + 1)

    def _upsample(self, section: Section, previous: Layer) -> Layer:
        factor = section.int("stride")
        value = self.graph.op(
            "Resize",
            [previous.value, "", self.graph.floats([1, 1, factor, factor])],
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )
        return Layer(value, previous.channels, previous.side * factor)

    def _route(self, section: Section, _previous: Layer) -> Layer:
        # Negative numbers count back from here, as Python's do.
        sources = [self.layers[int(index)] for index in section.numbers("layers")]
        value = sources[0].value
        if len(sources) > 1:
            value = self.graph.op("Concat", [source.value for source in sources], axis=1)
        return Layer(value, sum(source.channels for source in sources), sources[0].side)

    def _shortcut(self, section: Section, previous: Layer) -> Layer:
        other = self.layers[section.int("from")]
        return Layer(self.graph.op("Add", [previous.value, other.value]), previous.channels, previous.side)

    def _yolo(self, section: Section, previous: Layer) -> Layer:
        """Decodes one head to [batch, anchors, 5 + classes]; the anchor varies slowest, then y, then x."""
        graph, side = self.graph, previous.side
        anchors_all = np.array(section.numbers("anchors")).reshape(-1, 2)
        anchors = anchors_all[[int(i) for i in section.numbers("mask")]]
        classes, cells, stride = section.int("classes"), side * side, self.size // side
        value = graph.op("Reshape", [previous.value, graph.ints([0, len(anchors), 5 + classes, cells])])
        value = graph.op("Transpose", [value], perm=[0, 1, 3, 2])
        value = graph.op("Reshape", [value, graph.ints([0, len(anchors) * cells, 5 + classes])])
        centre, extent, scores = graph.op_many("Split", [value, graph.ints([2, 2, 1 + classes])], 3, axis=2)

        rows, columns = np.mgrid[:side, :side]
        grid = np.tile(np.stack([columns, rows], axis=-1).reshape(-1, 2), (len(anchors), 1))
        centre = graph.op("Add", [graph.op("Sigmoid", [centre]), graph.floats(grid[None])])
        centre = graph.op("Mul", [centre, graph.floats(stride)])
        extent = graph.op("Mul", [graph.op("Exp", [extent]), graph.floats(np.repeat(anchors, cells, axis=0)[None])])
        self.heads.append(graph.op("Concat", [centre, extent, graph.op("Sigmoid", [scores])], axis=2))

        self.anchor_count += len(anchors) * cells
        self.class_count = classes
        self.stride_max = max(self.stride_max, stride)
        return previous


def write_v8(graph: GraphWriter, value: str, anchors: int, classes: int) -> None:
    box, objectness, scores = graph.op_many("Split", [value, graph.ints([4, 1, classes])], 3, axis=2)
    scores = graph.op("Mul", [objectness, scores])
    value = graph.op("Transpose", [graph.op("Concat", [box, scores], axis=2)], perm=[0, 2, 1])
    graph.output("output0", value, ["batch", 4 + classes, anchors])


def write_v5(graph: GraphWriter, value: str, anchors: int, classes: int) -> None:
    graph.output("output0", value, ["batch", anchors, 5 + classes])


def ultralytics_metadata(description: str, names: list[str], size: int, stride: int) -> dict[str, str]:
    """The keys and the spelling of Ultralytics' exporter: values are Python literals."""
    return {
        "description": description,
        "task": "detect",
        "stride": str(stride),
        "batch": "1",
        "imgsz": repr([size, size]),
        "names": repr(dict(enumerate(names))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a Darknet YOLOv3(-tiny) model to ONNX.")
    parser.add_argument("cfg", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("names", type=Path, help="one class name a line")
    parser.add_argument("out", type=Path, help="the .onnx file to write")
    parser.add_argument("--size", type=int, default=416, help="side of the input in pixels, a multiple of 32 (416)")
    parser.add_argument("--style", choices=("v8", "v5"), default="v8", help="layout of the output (v8)")
    parser.add_argument("--keep-mask", action="store_true", help="do not mend the mask of yolov3-tiny.cfg")
    args = parser.parse_args()
    if args.size <= 0 or args.size % 32:
        parser.error("--size must be a multiple of 32")

    sections = parse_cfg(args.cfg.read_text())
    if not args.keep_mask and mend_tiny_mask(sections):
        print("mended the second mask of yolov3-tiny.cfg: 0,1,2 -> 1,2,3 (pjreddie/darknet#851)", file=sys.stderr)
    names = [line.strip() for line in args.names.read_text().splitlines() if line.strip()]

    converter = DarknetConverter(WeightStream(args.weights), args.size)
    value = converter.convert(sections)
    if converter.class_count != len(names):
        raise SystemExit(f"{args.names} has {len(names)} names, the network {converter.class_count} classes")
    write = write_v8 if args.style == "v8" else write_v5
    write(converter.graph, value, converter.anchor_count, converter.class_count)

    title = re.sub(r"\W+", "_", args.cfg.stem)
    description = f"{args.cfg.stem} (Darknet), output in the layout of YOLO{args.style}"
    metadata = ultralytics_metadata(description, names, args.size, converter.stride_max)
    converter.graph.save(args.out, title, metadata)


if __name__ == "__main__":
    main()
