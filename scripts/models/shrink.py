"""Make a smaller variant of a model, and measure what it saves and what it costs.

    python3 -m venv .demo/venv-shrink
    .demo/venv-shrink/bin/pip install -r scripts/models/requirements-shrink.txt
    .demo/venv-shrink/bin/python scripts/models/shrink.py MODEL_DIR OUT_DIR --to fp16 --photos PHOTOS

MODEL_DIR is a folder as on the Hugging Face hub, with model.onnx or onnx/model.onnx and preprocessor_config.json, of an
embedder or a detector. OUT_DIR gets the settings and the graph under the hub's name for it:

    --to           graph                       what is done
    fp16           onnx/model_fp16.onnx        weights and arithmetic in 16 bits; inputs and outputs stay f32
    int8-dynamic   onnx/model_int8.onnx        weights of matrices in 8 bits per channel, activations while running
    int8-static    onnx/model_quantized.onnx   and convolutions; ranges of activations from --calibrate PHOTOS
    pruned         onnx/model_pruned.onnx      hidden channels of MLPs taken out (--prune channels), or single weights
                                               set to 0 (--prune weights): that saves neither memory nor time

With --in-place the graph goes to MODEL_DIR/onnx/. The table compares with the f32 graph on the photos of --photos.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16

from hf_folder import ExportError, copy_settings, read_json
from model_input import Feeder, photos_in
from prune_graph import prune_mlps, prune_weights

NAMES = {
    "fp16": "model_fp16.onnx",
    "int8-dynamic": "model_int8.onnx",
    "int8-static": "model_quantized.onnx",
    "pruned": "model_pruned.onnx",
}
SOFTMAX_TYPES = ("detr", "yolos")
# Where a model holds few matrices, quantising those saves little.
HARDLY_SMALLER = 0.9
# Vocabularies have as many; what has fewer rows is no table worth the trouble.
TABLE_ROWS = 256
BATCH = 4
SCORE_FLOOR, IOU_SAME = 0.3, 0.9
DETECTIONS_COMPARED = 20

Feed = dict[str, np.ndarray]


# --- Making ---


def graph_of(folder: Path) -> Path:
    for name in ("model.onnx", "onnx/model.onnx"):
        if (folder / name).is_file():
            return folder / name
    raise ExportError(f"{folder} holds neither model.onnx nor onnx/model.onnx: export the model first")


def preprocessed(graph: Path, scratch: Path) -> Path:
    """Shapes worked out and constants folded: both conversions need it."""
    named, out = scratch / "named.onnx", scratch / "preprocessed.onnx"
    onnx.save(with_node_names(onnx.load(graph)), named)
    # It leaves files where it runs.
    with contextlib.chdir(scratch):
        try:
            quant_pre_process(str(named), str(out))
        except Exception:  # symbolic shape inference raises whatever it met; it is of use, not needed
            quant_pre_process(str(named), str(out), skip_symbolic_shape=True)
    onnx.save(with_node_names(onnx.load(out)), out)
    return out


def with_node_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Names are optional in ONNX, and the quantiser tells nodes apart by them."""
    taken: set[str] = set()
    for i, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"node_{i}"
        taken.add(node.name)
    return model


def without_repeated_casts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The fp16 converter adds the same cast once for each of its users; the runtime refuses the second."""
    seen: set[str] = set()
    kept = []
    for node in model.graph.node:
        if node.op_type == "Cast" and node.output[0] in seen:
            continue
        seen.update(node.output)
        kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return with_node_names(model)


def make_fp16(graph: Path, out: Path, scratch: Path) -> str:
    model = convert_float_to_float16(onnx.load(preprocessed(graph, scratch)), keep_io_types=True)
    onnx.save(without_repeated_casts(model), out)
    return "on a CPU 16-bit arithmetic is emulated and may be slower; it is meant for GPUs"


def make_int8_dynamic(graph: Path, out: Path, scratch: Path) -> str:
    # Convolutions are left alone: their dynamic 8-bit form is slower than f32.
    ready = preprocessed(graph, scratch)
    with contextlib.chdir(scratch):
        quantize_dynamic(
            ready,
            out,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            nodes_to_exclude=left_in_f32(onnx.load(ready)),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    if out.stat().st_size > HARDLY_SMALLER * graph.stat().st_size:
        return "hardly smaller: this model holds few matrices; --to int8-static quantises convolutions too"
    return ""


def left_in_f32(model: onnx.ModelProto) -> list[str]:
    """Names of nodes that must not be quantised.

    Gather that looks up no rows of an embedding table (sizes, slices, small constants), and MatMul by a vector, of
    which the quantiser makes a graph that does not load.
    """
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    tables = {name for name, shape in shapes.items() if len(shape) == 2 and shape[0] >= TABLE_ROWS}
    return [
        node.name
        for node in model.graph.node
        if (node.op_type == "Gather" and node.input[0] not in tables)
        or (node.op_type == "MatMul" and len(shapes.get(node.input[1], [0, 0])) < 2)
    ]


class Calibration(CalibrationDataReader):
    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._feeds, None)


def make_int8_static(graph: Path, out: Path, scratch: Path, feeds: list[Feed]) -> str:
    ready = preprocessed(graph, scratch)
    with contextlib.chdir(scratch):
        quantize_static(
            ready,
            out,
            Calibration(feeds),
            op_types_to_quantize=["MatMul", "Gemm", "Conv"],
            nodes_to_exclude=left_in_f32(onnx.load(ready)),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    return f"calibrated with {len(feeds)} photos"


def make_pruned(graph: Path, out: Path, amount: float, what: str) -> str:
    model = onnx.load(graph)
    if what == "weights":
        zeros = prune_weights(model, amount)
        onnx.save(model, out)
        packed = len(zlib.compress(out.read_bytes(), 6)) / 1e6
        return (
            f"{zeros:.0%} of all parameters are 0. That saves no memory and no time, in the runtime or on the GPU: the "
            f"matrices are as large as before. Only a compressed copy is smaller ({packed:.1f} MB)"
        )
    widths = prune_mlps(model, amount)
    if not widths:
        raise ExportError("no MLP was found whose channels can be taken out; --prune weights works on every graph")
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, out)
    before, after = widths[0]
    return (
        f"{len(widths)} MLPs narrowed, the first from {before} to {after} channels: smaller matrices, so less memory "
        "and less work. The accuracy is what is left without training afterwards; attention heads are kept"
    )


# --- Measuring ---


def require_loadable(path: Path, threads: int) -> None:
    try:
        open_session(path, threads)
    except Exception as e:  # onnxruntime has no base class of its own
        raise ExportError(f"onnxruntime does not load the new graph; nothing was kept: {e}") from e


def open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def batches(feeder: Feeder, photos: list[Path]) -> list[Feed]:
    """Photos of one size together, up to `BATCH`."""
    groups: dict[tuple, list[np.ndarray]] = {}
    for path in photos:
        tensor = feeder.reader.read(path)
        groups.setdefault(tensor.shape, []).append(tensor)
    return [feeder.feed(g[i : i + BATCH]) for g in groups.values() for i in range(0, len(g), BATCH)]


def images_per_s(sessions: list, feeds: list[Feed], pixels: str, rounds: int) -> list[float]:
    """Median over rounds in which the sessions take turns, so that a busy machine hits both alike."""
    count = sum(len(feed[pixels]) for feed in feeds)
    taken: list[list[float]] = [[] for _ in sessions]
    for _ in range(rounds):
        for seconds, session in zip(taken, sessions):
            start = time.perf_counter()
            for feed in feeds:
                session.run(None, feed)
            seconds.append(time.perf_counter() - start)
    return [count / statistics.median(seconds) for seconds in taken]


def outputs_of(session, feed: Feed) -> dict[str, np.ndarray]:
    outputs = dict(zip((output.name for output in session.get_outputs()), session.run(None, feed)))
    for name, values in outputs.items():
        if np.isnan(values).any():
            raise ExportError(f"the new graph gives NaN in {name}; nothing was kept")
    return outputs


def vectors(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """[images, dim]."""
    for name in ("image_embeds", "pooler_output"):
        if name in outputs:
            return outputs[name].reshape(len(outputs[name]), -1)
    values = next(iter(outputs.values()))
    return values[:, 0] if values.ndim == 3 else values.reshape(len(values), -1)


def cosines(full: dict[str, np.ndarray], small: dict[str, np.ndarray]) -> list[float]:
    a, b = vectors(full).astype(np.float64), vectors(small).astype(np.float64)
    return ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).tolist()


@dataclass
class Found:
    """Of one image: boxes [n, 4] x0 y0 x1 y1 in 0..1, best label and its score."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def found_in(outputs: dict[str, np.ndarray], softmax: bool) -> list[Found]:
    result = []
    for logits, boxes in zip(outputs["logits"].astype(np.float64), outputs["pred_boxes"].astype(np.float64)):
        powers = np.exp(np.clip(logits, -60, 60) if not softmax else logits - logits.max(-1, keepdims=True))
        scores = (powers / powers.sum(-1, keepdims=True))[:, :-1] if softmax else powers / (1 + powers)
        half = boxes[:, 2:] / 2
        corners = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
        result.append(Found(corners, scores.argmax(1), scores.max(1)))
    return result


def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    shared = np.clip(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]), 0, None).prod(1)
    return shared / ((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - shared + 1e-12)


def matched(full: Found, small: Found) -> tuple[int, list[float]]:
    """How many of the best detections are compared, and the score differences of those found again."""
    order = np.argsort(-full.scores)[:DETECTIONS_COMPARED]
    above = order[full.scores[order] > SCORE_FLOOR]
    chosen = above if len(above) else order[:1]
    differences = []
    for i in chosen:
        same = (overlap(full.boxes[i], small.boxes) >= IOU_SAME) & (small.labels == full.labels[i])
        if same.any():
            differences.append(float(np.abs(small.scores[same] - full.scores[i]).min()))
    return len(chosen), differences


def agreement(full, small, feeds: list[Feed], softmax: bool) -> str:
    pairs = [(outputs_of(full, feed), outputs_of(small, feed)) for feed in feeds]
    if {"logits", "pred_boxes"} <= pairs[0][0].keys():
        compared, differences = 0, []
        for a, b in pairs:
            for of_full, of_small in zip(found_in(a, softmax), found_in(b, softmax)):
                count, found = matched(of_full, of_small)
                compared, differences = compared + count, differences + found
        scores = f", score differs by {max(differences):.4f} at most" if differences else ""
        return f"{len(differences)} of {compared} boxes found again at IoU {IOU_SAME} with their label{scores}"
    values = [cosine for a, b in pairs for cosine in cosines(a, b)]
    return f"cosine to f32: least {min(values):.5f}, median {statistics.median(values):.5f} over {len(values)} photos"


def report(full: Path, small: Path, folder: Path, photos: list[Path], threads: int, rounds: int) -> list[str]:
    sessions = [open_session(path, threads) for path in (full, small)]
    feeder = Feeder(folder, sessions[0].get_inputs())
    feeds = batches(feeder, photos)
    config = folder / "config.json"
    softmax = config.is_file() and read_json(config).get("model_type") in SOFTMAX_TYPES
    quality = agreement(*sessions, feeds, softmax)
    speeds = images_per_s(sessions, feeds, feeder.pixels, rounds)
    sizes = [path.stat().st_size / 1e6 for path in (full, small)]
    return [
        f"{'':14}{'f32':>10}{'new':>10}",
        f"{'MB on disk':14}{sizes[0]:10.2f}{sizes[1]:10.2f}{sizes[1] / sizes[0]:9.0%}",
        f"{'images/s':14}{speeds[0]:10.1f}{speeds[1]:10.1f}{speeds[1] / speeds[0]:8.2f}x",
        quality,
    ]


# --- The command ---


def make(args: argparse.Namespace, graph: Path, part: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if args.to == "fp16":
            return make_fp16(graph, part, scratch)
        if args.to == "int8-dynamic":
            return make_int8_dynamic(graph, part, scratch)
        if args.to == "pruned":
            return make_pruned(graph, part, args.amount, args.prune)
        session = open_session(graph, args.threads)
        feeder = Feeder(args.model_dir, session.get_inputs())
        feeds = [feeder.feed([feeder.reader.read(path)]) for path in photos_in(args.calibrate)]
        return make_int8_static(graph, part, scratch, feeds)


def shrink(args: argparse.Namespace) -> None:
    graph = graph_of(args.model_dir).resolve()
    target = (args.model_dir if args.in_place else args.out_dir).resolve()
    photos = photos_in(args.photos or args.calibrate) if args.photos or args.calibrate else []
    out = target / "onnx" / NAMES[args.to]
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.stem}.part.onnx")
    try:
        note = make(args, graph, part)
        require_loadable(part, args.threads)
        lines = report(graph, part, args.model_dir, photos, args.threads, args.rounds) if photos else []
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    if not args.in_place:
        copy_settings(args.model_dir, target)
    print("\n".join([str(out), *lines, *([note] if note else [])]))
    if not photos:
        print("not measured: give --photos DIR")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a smaller variant of a model and measure it.")
    parser.add_argument("model_dir", type=Path, help="folder with model.onnx and preprocessor_config.json")
    parser.add_argument("out_dir", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--to", choices=sorted(NAMES), required=True)
    parser.add_argument("--in-place", action="store_true", help="add the graph to MODEL_DIR/onnx/")
    parser.add_argument("--photos", type=Path, help="folder of photos to compare on")
    parser.add_argument("--calibrate", type=Path, help="folder of photos for int8-static; some hundred are good")
    parser.add_argument("--amount", type=float, default=0.3, help="share that pruning takes (0.3)")
    parser.add_argument("--prune", choices=("channels", "weights"), default="channels", help="what pruning takes")
    parser.add_argument("--threads", type=int, default=0, help="of the runtime (as many as cores)")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed measurement (5)")
    args = parser.parse_args(arguments)
    if (args.out_dir is None) != args.in_place:
        parser.error("either OUT_DIR or --in-place")
    if args.to == "int8-static" and args.calibrate is None:
        parser.error("--to int8-static needs --calibrate PHOTOS")
    if not 0 < args.amount < 1:
        parser.error("--amount is a share between 0 and 1")
    if args.rounds < 1:
        parser.error("--rounds is 1 at least")
    return args


def main() -> None:
    try:
        shrink(parsed())
    except ExportError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
