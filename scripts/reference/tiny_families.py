"""Make a tiny model of each family that croprow reads, and write down what Hugging Face says of the golden pictures.

Writes tests/data/models/<family>-tiny/ (a folder as on the hub: config.json, preprocessor_config.json, tokenizer
files, model.onnx, and reference.json) and tests/data/reference/families/<family>.json with the pixels beside it.
The graphs come from scripts/models/export_detector.py and export_embedder.py. Weights are random and seeded.

    .demo/venv-export/bin/pip install -r scripts/models/requirements-export.txt
    .demo/venv-export/bin/python scripts/reference/tiny_families.py                 # all
    .demo/venv-export/bin/python scripts/reference/tiny_families.py detr owlvit     # some

A reference has, per picture: `file`; `upright`, its width and height; `tensor`, those of the model's input; `pixels`,
a lossless WebP with the picture after the processor's resize and crop, or an .f32 file, little-endian [3, h, w], where
the processor resizes floating-point numbers; and the results. Boxes of `detections` are x0 y0 x1 y1 in pixels of the
upright picture, best score first, all above `threshold`. `reaction` says how far a wrong input (`blue_for_red`,
`no_antialias`) moves the results of the picture that shows it best, and how far Pillow's resize instead of
torchvision's does at most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import onnx
import torch
import transformers

import family_reference
import tiny_detectors
import tiny_embedders
from family_reference import PROJECT, CommittedGraph, Picture, Reader, detector_reference, embedder_reference
from tiny_clip_tokenizer import save as save_tokenizer

sys.path.insert(0, str(PROJECT / "scripts/models"))
import export_detector  # noqa: E402
import export_embedder  # noqa: E402
from hf_folder import write_json  # noqa: E402
from torch_export import Differences  # noqa: E402

GRAPHS_LIMIT_BYTES = 10_000_000
# Its folder came with the golden pictures; the weights are in no other form than the graph.
COMMITTED = "dinov2"
TINY = {**tiny_detectors.DETECTORS, **tiny_embedders.EMBEDDERS}


def build_folder(name: str, folder: Path, photos: list[Picture]) -> None:
    """A Hugging Face folder with weights."""
    tiny = TINY[name]
    folder.mkdir(parents=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny.preprocessor, indent=2) + "\n")
    if tokenizer := tiny.tokenizer():
        save_tokenizer(tokenizer, folder)
    if name in tiny_embedders.EMBEDDERS:
        tiny_embedders.build(tiny).save_pretrained(folder)
        return
    model = tiny_detectors.build(tiny)
    model.save_pretrained(folder)
    # The heads are set by what the model sees in the pictures.
    detector, reader = export_detector.Detector(folder), Reader(folder)
    prompt = {"prompt": tiny.prompt} if tiny.prompt else {}
    feeds = [family_reference.feed_of(detector, reader.read(photo.image)[None], prompt) for photo in photos]
    detector.model = model
    tiny.finish(model, lambda: [family_reference.run_torch(detector, feed) for feed in feeds])
    model.save_pretrained(folder)


def shorten_names(path: Path) -> None:
    """Names of nodes and inner values take more room in a tiny graph than its weights."""
    model = onnx.load(path)
    kept = {value.name for value in [*model.graph.input, *model.graph.output]}
    short: dict[str, str] = {"": ""}

    # Weights and values apart: onnxruntime's quantiser makes up names of weights by counting on.
    def rename(name: str, letter: str = "v") -> str:
        return name if name in kept else short.setdefault(name, f"{letter}{len(short)}")

    def rename_graph(graph: onnx.GraphProto) -> None:
        for initializer in graph.initializer:
            initializer.name = rename(initializer.name, "w")
        for node in graph.node:
            node.name = ""
            node.input[:] = [rename(name) for name in node.input]
            node.output[:] = [rename(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rename_graph(attribute.g)
        for value in [*graph.input, *graph.output]:
            value.name = rename(value.name)
        del graph.value_info[:]

    rename_graph(model.graph)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def make(name: str, data: Path, photos: list[Picture]) -> None:
    target, pixels = data / "models" / f"{name}-tiny", data / "reference/families"
    pixels.mkdir(parents=True, exist_ok=True)
    if name == COMMITTED:
        content = embedder_reference(CommittedGraph(target), target, photos, pixels)
        differences = "as committed"
    else:
        content, differences = make_with_weights(name, target, pixels, photos)
    made_with = {module.__name__: module.__version__ for module in (torch, transformers, onnx)}
    write_json(pixels / f"{name}.json", {"family": name, "made_with": made_with, **content})
    print(f"{name}: {(target / 'model.onnx').stat().st_size} bytes; {differences}")
    found = [len(picture["detections"]) for picture in content["pictures"] if "detections" in picture]
    print(f"  detections {found} above {content.get('threshold')}; {content['reaction']}")


def make_with_weights(name: str, target: Path, pixels: Path, photos: list[Picture]) -> tuple[dict, Differences]:
    tiny = TINY[name]
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        build_folder(name, folder, photos)
        if name in tiny_detectors.DETECTORS:
            _, differences = export_detector.export(folder, target)
            shorten_names(target / "model.onnx")
            content = detector_reference(folder, target / "model.onnx", photos, pixels, tiny.prompt)
        else:
            embedder, differences = export_embedder.export(folder, target, tiny.whole)
            shorten_names(target / "model.onnx")
            content = embedder_reference(embedder, target, photos, pixels)
    return content, differences


def remove_unused_pixels(folder: Path) -> None:
    used = {p["pixels"] for path in folder.glob("*.json") for p in json.loads(path.read_text())["pictures"]}
    for path in folder.iterdir():
        if path.suffix in (".webp", ".f32") and path.name not in used:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny models of all families and their references.")
    known = [COMMITTED, *TINY]
    parser.add_argument("families", nargs="*", help=f"some of {', '.join(known)} (all)")
    parser.add_argument("--data", type=Path, default=PROJECT / "tests/data")
    parser.add_argument("--pictures", type=Path, help="the golden pictures (DATA/golden/pictures)")
    args = parser.parse_args()
    if unknown := set(args.families) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    photos = family_reference.pictures(args.pictures or args.data / "golden/pictures")
    for name in args.families or known:
        make(name, args.data, photos)
    remove_unused_pixels(args.data / "reference/families")
    graphs = sum((args.data / "models" / f"{name}-tiny/model.onnx").stat().st_size for name in args.families or known)
    print(f"graphs together: {graphs} bytes")
    if graphs > GRAPHS_LIMIT_BYTES:
        raise SystemExit("the graphs are too large to commit")


if __name__ == "__main__":
    main()
