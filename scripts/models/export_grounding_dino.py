"""Export a Hugging Face folder of GroundingDINO to ONNX, and prove the graph against PyTorch.

    python -m venv .demo/venv-export
    .demo/venv-export/bin/pip install -r scripts/models/requirements-export.txt
    .demo/venv-export/bin/python scripts/models/export_grounding_dino.py grounding-dino-tiny grounding-dino-tiny-onnx

Inputs   pixel_values    f32 [batch, 3, height, width]    normalised
         input_ids, token_type_ids, attention_mask        i64 [batch, tokens], at most 256 tokens
         pixel_mask      i64 [batch, height, width]       1 where the picture is, 0 where padding is
Outputs  logits          f32 [batch, queries, 256]        -inf where no token is
         pred_boxes      f32 [batch, queries, 4]          cx cy w h, in 0..1 of each picture

Batch, height, width and the number of tokens are dynamic. OUT_DIR gets model.onnx (weights beside it if they are
more than 2 GB), config.json, preprocessor_config.json, tokenizer.json, tokenizer_config.json and reference.json:
PyTorch's best detections for three patterns. It comes into being only after every case of grounding_dino_check.py
gave the same numbers as PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
REQUIREMENTS = Path(__file__).with_name("requirements-export.txt")
try:
    import numpy as np
    import torch
    import transformers
    from torch import nn
    from transformers import GroundingDinoForObjectDetection

    from grounding_dino_cases import LONG, MIDDLE, SHORT, Case, Preparation, best_detections
    from grounding_dino_check import Graph, Reference, verify
    from torch_export import without_stdout
except ImportError as error:
    raise SystemExit(f"{error}\ninstall the packages first: pip install -r {REQUIREMENTS}") from error

INPUTS = ["pixel_values", "input_ids", "token_type_ids", "attention_mask", "pixel_mask"]
OUTPUTS = ["logits", "pred_boxes"]
BATCH, TOKENS = {0: "batch_size"}, {0: "batch_size", 1: "sequence_length"}
DYNAMIC = {
    "pixel_values": {0: "batch_size", 2: "height", 3: "width"},
    "input_ids": TOKENS,
    "token_type_ids": TOKENS,
    "attention_mask": TOKENS,
    "pixel_mask": {0: "batch_size", 1: "height", 2: "width"},
    "logits": BATCH,
    "pred_boxes": BATCH,
}
TRACED = Case("traced", [(331, 277), (293, 301)], [MIDDLE, SHORT])

# Three of them are written down: those whose kept queries are furthest from ties.
REFERENCE_CASES = [
    Case("", [size], [prompt])
    for size, prompt in zip(
        [(264, 248), (320, 240), (288, 304), (248, 336), (397, 301), (400, 300)],
        [SHORT, MIDDLE, LONG, MIDDLE, SHORT, "a cat. a dog."],
    )
]
REFERENCE_COUNT = 3
REFERENCE_LIMIT = 1e-3


class Outputs(nn.Module):
    """The model with its inputs in order and its two outputs only. In eval mode: exporting restores the mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(**dict(zip(INPUTS, inputs)))
        return output.logits, output.pred_boxes


def require_model_folder(folder: Path) -> None:
    """Fails unless the folder has what an export needs."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{folder}: no config.json; give a folder as the Hugging Face hub has it")
    family = json.loads((folder / "config.json").read_text()).get("model_type")
    if family != "grounding-dino":
        raise SystemExit(f"{folder}: model_type is {family!r}, not 'grounding-dino'")
    if not list(folder.glob("*.safetensors")):
        raise SystemExit(f"{folder}: no .safetensors file")
    if not (folder / "tokenizer.json").is_file():
        raise SystemExit(
            f"{folder}: no tokenizer.json; make one of the other tokenizer files with\n"
            f"  AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    image_settings(folder)


def image_settings(folder: Path) -> dict:
    """The image processor's settings, from either of the files that transformers writes."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text())
            settings = settings.get("image_processor", settings)
            if "image_mean" in settings and "image_std" in settings:
                return settings
    raise SystemExit(f"{folder}: no image_mean and image_std in preprocessor_config.json or processor_config.json")


def load_model(folder: Path) -> nn.Module:
    """The model with its default attention. A tensor that the file lacks would be random: refused."""
    transformers.utils.logging.disable_progress_bar()
    model, loading = GroundingDinoForObjectDetection.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
    )
    faults = [
        f"{kind}: {sorted(map(str, loading[kind]))[:5]}"
        for kind in ("missing_keys", "mismatched_keys")
        if loading[kind]
    ]
    if faults:
        raise SystemExit(f"{folder}: the weights do not fit config.json; {'; '.join(faults)}")
    return model.eval()


def export_graph(model: nn.Module, preparation: Preparation, path: Path, opset: int) -> None:
    """Writes the graph; weights of more than 2 GB go into a file beside it."""
    try:
        from grounding_dino_patches import MADE_FOR, exportable
    except AttributeError as error:
        raise SystemExit(f"transformers {transformers.__version__} is not as expected: {error}") from error
    if transformers.__version__ != MADE_FOR:
        print(f"note: made for transformers {MADE_FOR}, this is {transformers.__version__}", file=sys.stderr)
    inputs = preparation.inputs_of(TRACED)
    example = tuple(torch.from_numpy(inputs[name]) for name in INPUTS)
    with exportable(model), torch.no_grad(), warnings.catch_warnings(), without_stdout():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                Outputs(model), example, str(path), dynamo=False, opset_version=opset,
                input_names=INPUTS, output_names=OUTPUTS, dynamic_axes=DYNAMIC,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise SystemExit(f"PyTorch cannot export this model: {error}") from error


def copy_settings(source: Path, target: Path) -> None:
    """The small files of a hub folder."""
    (target / "preprocessor_config.json").write_text(json.dumps(image_settings(source), indent=2) + "\n")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def answers(case: Case, graph: Graph, reference: Reference, preparation: Preparation) -> tuple[dict, float, float]:
    """A case for reference.json, how far the graph is from it, and its least gap between kept queries."""
    inputs = preparation.inputs_of(case)
    labels = preparation.labels_of_tokens(case.prompts[0])
    expected, found = reference.run(inputs), graph.run(inputs)
    detections, others = (best_detections(each.logits[0], each.boxes[0], labels) for each in (expected, found))
    numbers, other_numbers = (np.array([[d["score"], *d["box"]] for d in each]) for each in (detections, others))
    width, height = case.sizes_px[0]
    entry = {"width_px": width, "height_px": height, "prompt": case.prompts[0], "detections": detections}
    return entry, float(np.abs(numbers - other_numbers).max()), reference.least_gap(expected.queries.shape[1])


def write_reference(path: Path, graph: Graph, reference: Reference, preparation: Preparation) -> None:
    """PyTorch's detections for the cases furthest from ties: near one, another machine may rightly differ."""
    cases = [answers(case, graph, reference, preparation) for case in REFERENCE_CASES]
    cases = [case for case in cases if case[1] <= REFERENCE_LIMIT]
    if not cases:
        print("note: every pattern is too near a tie; reference.json has no cases", file=sys.stderr)
    cases = sorted(cases, key=lambda case: -case[2])[:REFERENCE_COUNT]
    for entry, differs, gap in cases:
        print(
            f"reference {entry['width_px']} x {entry['height_px']}: graph differs by {differs:.1e}, least gap {gap:.1e}"
        )
    content = {
        "format": "croprow-reference-1",
        "kind": "detector",
        "mean": preparation.mean,
        "std": preparation.std,
        "cases": [entry for entry, _, _ in cases],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def export(source: Path, target: Path, opset: int) -> None:
    """Makes the whole folder under another name, proves it, and gives it its name."""
    require_model_folder(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SystemExit(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        copy_settings(source, made)
        preparation, model = Preparation.of_folder(made), load_model(source)
        export_graph(model, preparation, made / "model.onnx", opset)
        graph, reference = Graph(made / "model.onnx"), Reference(model)
        wrong = verify(graph, reference, preparation)
        if wrong:
            raise SystemExit(f"{wrong} cases differ from PyTorch: the graph is wrong and was not kept")
        write_reference(made / "reference.json", graph, reference, preparation)
        made.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Export GroundingDINO to ONNX and verify it against PyTorch.")
    parser.add_argument("model_dir", type=Path, help="a Hugging Face folder of GroundingDINO, with safetensors")
    parser.add_argument("out_dir", type=Path, help="the folder to make")
    parser.add_argument("--opset", type=int, default=17, choices=range(16, 21), metavar="16..20", help="of ONNX (17)")
    args = parser.parse_args()
    export(args.model_dir, args.out_dir, args.opset)
    size = sum(file.stat().st_size for file in args.out_dir.iterdir())
    print(f"{args.out_dir}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
