"""Convert EfficientNet-Lite0's PyTorch weights to an ONNX embedder, with numpy and onnx only.

Input    images     f32 [batch, 3, 224, 224]   RGB, (value / 255 - mean) / std with the numbers below
Outputs  embedding  f32 [batch, 1280]          pooled features, before the classifier; not normalised
         logits     f32 [batch, 1000]          ImageNet-1k classes

Beside the model goes a `croprow.toml` that says how croprow has to feed it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from onnx_graph import GraphWriter
from torch_checkpoint import load_state_dict

SIZE_PX = 224
EMBEDDING_DIM = 1280
CLASS_COUNT = 1000
BATCH_NORM_EPSILON = 1e-3

# The package does not say how to normalise, and a cat is a cat under ImageNet's numbers too (chelsea.png:
# Egyptian cat 0.76 and 0.77), so the weights themselves were asked. Over the 15 demo photos the variance of
# the stem convolution's output is 0.85 times the running variance of the batch norm behind it with these
# numbers (median over channels, quartiles 0.83 to 1.05), and 4.2 times with ImageNet's mean and deviation.
# They are also what Google trained the Lite models with: (value - 127) / 128.
MEAN = [0.5, 0.5, 0.5]
STD = [0.5, 0.5, 0.5]

# (repeats, kernel, stride of the first, expansion, output channels), as in the EfficientNet paper; the
# Lite variants drop squeeze-and-excitation and use ReLU6.
STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]
STEM_CHANNELS = 32

CROPROW_TOML = """\
# How croprow feeds this model. Written by scripts/models/efficientnet_lite_to_onnx.py.
[embedder]
output = "embedding"        # name of the graph's output
pooling = "vector"          # vector | pooled | cls | mean
normalize = true            # L2

[input]
name = "images"
width = {size}
height = {size}
resize = "bicubic"          # bilinear | bicubic | lanczos3 | nearest
crop_fit = "squash"         # squash | pad | center ; center has resize_shortest = 256
mean = {mean}   # after division by 255
std = {std}
"""


class LiteConverter:
    """Writes the network block by block; batch norms are folded into the convolutions before them."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.graph = GraphWriter()
        self.zero = self.graph.floats(0)
        self.six = self.graph.floats(6)

    def conv(self, value: str, weights: str, norm: str, stride: int = 1, groups: int = 1, relu6: bool = True) -> str:
        kernels = self.tensors[f"{weights}.weight"].astype(np.float64)
        variance = self.tensors[f"{norm}.running_var"].astype(np.float64)
        scale = self.tensors[f"{norm}.weight"] / np.sqrt(variance + BATCH_NORM_EPSILON)
        bias = self.tensors[f"{norm}.bias"] - self.tensors[f"{norm}.running_mean"] * scale
        value = self.graph.op(
            "Conv",
            [value, self.graph.floats(kernels * scale[:, None, None, None]), self.graph.floats(bias)],
            kernel_shape=list(kernels.shape[2:]),
            strides=[stride, stride],
            group=groups,
            # TensorFlow's "same" padding, which these weights were trained with.
            auto_pad="SAME_UPPER",
        )
        return self.graph.op("Clip", [value, self.zero, self.six]) if relu6 else value

    def block(self, value: str, index: int, stride: int, channels_in: int, expansion: int, channels_out: int) -> str:
        prefix, wide = f"_blocks.{index}.", channels_in * expansion
        inner = value
        if expansion != 1:
            inner = self.conv(inner, f"{prefix}_expand_conv", f"{prefix}_bn0")
        inner = self.conv(inner, f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride, groups=wide)
        inner = self.conv(inner, f"{prefix}_project_conv", f"{prefix}_bn2", relu6=False)
        if stride == 1 and channels_in == channels_out:
            return self.graph.op("Add", [value, inner])
        return inner

    def convert(self) -> GraphWriter:
        graph = self.graph
        value = graph.input("images", ["batch", 3, SIZE_PX, SIZE_PX])
        value = self.conv(value, "_conv_stem", "_bn0", stride=2)
        channels, index = STEM_CHANNELS, 0
        for repeats, _kernel, first_stride, expansion, channels_out in STAGES:
            for repeat in range(repeats):
                stride = first_stride if repeat == 0 else 1
                value = self.block(value, index, stride, channels, expansion, channels_out)
                channels, index = channels_out, index + 1
        value = self.conv(value, "_conv_head", "_bn1")
        value = graph.op("ReduceMean", [value], axes=[2, 3], keepdims=0)
        graph.output("embedding", value, ["batch", EMBEDDING_DIM])
        classifier = [graph.floats(self.tensors[name]) for name in ("_fc.weight", "_fc.bias")]
        graph.output("logits", graph.op("Gemm", [value, *classifier], transB=1), ["batch", CLASS_COUNT])
        return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert EfficientNet-Lite0 (.pth) to an ONNX embedder.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="the .onnx file to write; croprow.toml goes beside it")
    args = parser.parse_args()

    graph = LiteConverter(load_state_dict(args.checkpoint)).convert()
    graph.save(args.out, "efficientnet_lite0")
    settings = CROPROW_TOML.format(size=SIZE_PX, mean=MEAN, std=STD)
    args.out.with_name("croprow.toml").write_text(settings)


if __name__ == "__main__":
    main()
