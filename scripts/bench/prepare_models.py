"""The models of the measurements: published architectures with seeded weights. Speed does not ask what was learnt.

    grounding-dino-tiny         a small GroundingDINO (scripts/reference/tiny_grounding_dino.py), input 800 to 1333
    grounding-dino-tiny-onnx    the same, exported; this is what croprow and the onnxruntime peer read
    grounding-dino-small-input  the same graph with an input of 160 to 320: many shapes in little time
    dinov2-small                facebook/dinov2-small (ViT-S/14: 12 layers, 384 wide, 6 heads)
    dinov2-small-onnx           the same, exported
    one-layer                   an embedder that costs next to nothing

Example: prepare_models.py .demo/bench/models
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS / "models"), str(SCRIPTS / "reference")]

import torch  # noqa: E402
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model  # noqa: E402

import export_embedder  # noqa: E402
import export_grounding_dino  # noqa: E402
from golden import save_tiny_model  # noqa: E402
from one_layer_embedder import CONFIG, PREPROCESSOR, write_graph  # noqa: E402
from tiny_grounding_dino import keep_signal  # noqa: E402

SEED = 20260
SMALL_INPUT = {"shortest_edge": 160, "longest_edge": 320}
OPSET = 17


@torch.no_grad()
def save_dinov2(folder: Path) -> None:
    """With as much attention, layer scale and position as a trained one has, so that vectors tell pictures apart."""
    torch.manual_seed(SEED)
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14
    )  # fmt: skip
    model = Dinov2Model(config).eval()
    for module in model.modules():
        keep_signal(module)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.weight", "key.weight")):
            parameter.mul_(1.6)
        elif "lambda1" in name:
            parameter.fill_(0.4)
    torch.nn.init.normal_(model.embeddings.position_embeddings, std=0.2)
    torch.nn.init.normal_(model.embeddings.cls_token, std=0.2)
    model.save_pretrained(folder)
    settings = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    BitImageProcessor(**settings).save_pretrained(folder)


def save_small_input(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": SMALL_INPUT}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="is made anew")
    out = parser.parse_args().out_dir
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    save_dinov2(out / "dinov2-small")
    export_embedder.export(out / "dinov2-small", out / "dinov2-small-onnx")
    write_graph(out / "one-layer/model.onnx")
    (out / "one-layer/preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    (out / "one-layer/config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_tiny_model(out / "grounding-dino-tiny")
    export_grounding_dino.export(out / "grounding-dino-tiny", out / "grounding-dino-tiny-onnx", OPSET)
    save_small_input(out / "grounding-dino-tiny-onnx", out / "grounding-dino-small-input")


if __name__ == "__main__":
    main()
