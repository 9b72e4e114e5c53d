"""Make the tiny ONNX embedders of the tests of stopping: calls that do not end by themselves.

Writes tests/data/models/<name>/model.onnx (below 2 KB each). Same bytes every time. Python and packages: as for
detect_and_embed.py.

  hangs-on-white   pixel_values [batch, 3, 16, 16] -> vector [batch, 3], the mean of each channel. Counts first, to
                   the 64th power of the brightest image's mean times 4e9: at once for most pictures, for hours
                   where one is white. A black picture has a vector of zeros.
  hangs            the same, but it always counts for hours
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from onnx import TensorProto, helper

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "scripts/models"))
from onnx_graph import GraphWriter  # noqa: E402

SIDE_PX = 16
POWER = 64.0
STEPS = 4e9
CARD = '[input]\nresize = "bilinear"\nmean = [0, 0, 0]\nstd = [1, 1, 1]\n'


def counting() -> "helper.GraphProto":
    """One step of the loop; the result stays one."""
    number = [TensorProto.FLOAT, [1]]
    return helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Mul", ["sum", "factor"], ["sum_out"]),
        ],
        "count",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", *number),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", *number),
        ],
        [helper.make_tensor("factor", TensorProto.FLOAT, [1], [1.0])],
    )


def build(path: Path, always: bool) -> None:
    graph = GraphWriter()
    pixels = graph.input("pixel_values", ["batch", 3, SIDE_PX, SIDE_PX])
    means = graph.op("ReduceMean", [pixels], axes=[2, 3], keepdims=0)
    if always:
        # Not a constant, or the runtime would count while it loads the graph.
        brightest = graph.op("Add", [graph.op("Mul", [brightest_of(graph, means), graph.floats(0.0)]), graph.floats(1.0)])
    else:
        brightest = brightest_of(graph, means)
    share = graph.op("Pow", [brightest, graph.floats(POWER)])
    steps = graph.op("Cast", [graph.op("Mul", [share, graph.floats(STEPS)])], to=TensorProto.INT64)
    one = graph.op("Loop", [steps, "", graph.floats(1.0)], body=counting())
    graph.output("vector", graph.op("Mul", [means, one]), ["batch", 3])
    graph.save(path, "hangs")


def brightest_of(graph: GraphWriter, means: str) -> str:
    """The largest mean of an image in the batch, a scalar."""
    return graph.op("ReduceMax", [graph.op("ReduceMean", [means], axes=[1], keepdims=0)], axes=[0], keepdims=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedders that hang.")
    parser.add_argument("--data", type=Path, default=PROJECT / "tests/data")
    models = parser.parse_args().data / "models"
    for name, always in [("hangs-on-white", False), ("hangs", True)]:
        path = models / name / "model.onnx"
        build(path, always)
        path.with_name("croprow.toml").write_text(CARD)
        print(f"{name:16} {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
