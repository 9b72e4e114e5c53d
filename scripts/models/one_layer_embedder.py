"""Write an embedder of one layer: the mean patch of a 224 x 224 image, multiplied by one small matrix.

    .demo/venv-export/bin/python scripts/models/one_layer_embedder.py embedders/one-layer/

Input    pixel_values   f32 [batch, 3, 224, 224]
Output   image_embeds   f32 [batch, 64]

It costs next to nothing, so that a run with it shows what everything around a model costs. preprocessor_config.json is
that of facebook/dinov2-small: shortest edge 256, bicubic, centre crop 224. The matrix is seeded. Needs onnx and numpy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from onnx_graph import GraphWriter

SIDE_PX, PATCH_PX, DIM, SEED = 224, 14, 64, 20262

PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": SIDE_PX, "width": SIDE_PX},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}

# Larger pictures are decoded for embedders that do not begin with patches.
CONFIG = {"patch_size": PATCH_PX}


def write_graph(path: Path) -> None:
    """Mean over the patches first, then the matrix: the same as the mean of projected patches."""
    graph = GraphWriter()
    pixels = graph.input("pixel_values", ["batch", 3, SIDE_PX, SIDE_PX])
    patches = SIDE_PX // PATCH_PX
    # batch, channel, patch row, row, patch column, column
    split = graph.op("Reshape", [pixels, graph.ints([-1, 3, patches, PATCH_PX, patches, PATCH_PX])])
    mean = graph.op("ReduceMean", [split], axes=[2, 4], keepdims=0)
    flat = graph.op("Reshape", [mean, graph.ints([-1, 3 * PATCH_PX * PATCH_PX])])
    inputs = 3 * PATCH_PX * PATCH_PX
    matrix = np.random.default_rng(SEED).normal(0, inputs**-0.5, (inputs, DIM))
    graph.output("image_embeds", graph.op("MatMul", [flat, graph.floats(matrix)]), ["batch", DIM])
    graph.save(path, "one_layer_embedder")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an embedder of one layer.")
    parser.add_argument("out_dir", type=Path)
    arguments = parser.parse_args()
    write_graph(arguments.out_dir / "model.onnx")
    (arguments.out_dir / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    (arguments.out_dir / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    print(f"{arguments.out_dir}: a vector of {DIM}")


if __name__ == "__main__":
    main()
