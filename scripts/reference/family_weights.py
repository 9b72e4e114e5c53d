"""Random weights under which a small model still looks at its picture.

The usual initialisation (standard deviation 0.02, zeros in the last layer of a box head) makes a small model give
nearly the same answer to every picture, and then a wrong input would pass every comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

# Part of a parameter's name: its standard deviation. The first that fits counts.
BY_NAME = {
    "relative_position_bias_table": 0.2,
    "level_embed": 0.5,
    "mid_position_embeddings": 0.3,
    "position_embedding": 0.3,
    "detection_tokens": 0.6,
    "cls_token": 0.2,
    "class_embedding": 0.2,
    "register_tokens": 0.3,
    "probe": 0.5,
}
# As much of a block's output as trained models have; initialised to 1e-5 or 1, the picture is lost or drowned.
LAYER_SCALE = 0.4


@torch.no_grad()
def fan_in_init(model: nn.Module) -> None:
    """Standard deviation 1 / sqrt(inputs) for every matrix, sqrt(2) times that in front of a ReLU's convolution."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        elif isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=math.sqrt(2 / module.weight[0].numel()))
        elif isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)) or "Norm2d" in type(module).__name__:
            nn.init.normal_(module.weight, mean=1.0, std=0.05)
            nn.init.normal_(module.bias, std=0.05)
            if hasattr(module, "running_mean"):
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.7, 1.3)
            continue
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
            continue
        else:
            continue
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.02)
    for name, parameter in model.named_parameters():
        _init_by_name(name, parameter)


def _init_by_name(name: str, parameter: nn.Parameter) -> None:
    if "lambda" in name or "layer_scale_parameter" in name:
        parameter.fill_(LAYER_SCALE)
    elif name.endswith("sampling_offsets.weight"):
        # Zero otherwise, and then the offsets do not hang on the query.
        nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
    elif name.endswith("sampling_offsets.bias"):
        nn.init.normal_(parameter, std=1.0)
    elif name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
        parameter.mul_(1.6)
    else:
        for part, std in BY_NAME.items():
            if part in name:
                nn.init.normal_(parameter, std=std)
                return


@torch.no_grad()
def spread(layer: nn.Linear | nn.Conv2d, run: Callable[[], object], mean: float, std: float) -> None:
    """Scales and shifts `layer` so that over `run()` each of its outputs has this mean and standard deviation."""
    seen: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    run()
    hook.remove()
    if not seen:
        # D-FINE has heads that only training runs.
        return
    channels = 1 if isinstance(layer, nn.Conv2d) else -1
    values = torch.cat([output.movedim(channels, -1).flatten(0, -2) for output in seen])
    scale = std / values.std(0).clamp(min=1e-6)
    layer.bias.copy_((layer.bias - values.mean(0)) * scale + mean)
    layer.weight.mul_(scale.reshape(-1, *[1] * (layer.weight.dim() - 1)))
