"""A GroundingDINO with the published structure and seeded random weights, small enough for tests.

Hugging Face's own initial weights (deviation 0.02) let a small network collapse to constants, and then every
comparison passes. Here the signal stays alive: deviation 1 / sqrt(inputs), and what starts at 0 does not.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import BertConfig, GroundingDinoConfig, GroundingDinoForObjectDetection, SwinConfig

SEED = 20261

# Of the last text layer norm: spreads the scores over 0.3 to 0.95.
TEXT_SCALE = 0.30


def tiny_config() -> GroundingDinoConfig:
    backbone = SwinConfig(
        image_size=224, embed_dim=8, depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4], window_size=7,
        drop_path_rate=0.0, out_indices=[2, 3, 4],
    )  # fmt: skip
    text = BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=512,
    )  # fmt: skip
    return GroundingDinoConfig(
        backbone_config=backbone, text_config=text, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=30,
        num_feature_levels=4, encoder_n_points=4, decoder_n_points=4, max_text_len=256, dropout=0.0,
        fusion_droppath=0.0,
    )  # fmt: skip


@torch.no_grad()
def seeded_model(config: GroundingDinoConfig, text_scale: float = TEXT_SCALE) -> GroundingDinoForObjectDetection:
    """The same weights for the same configuration and version of torch."""
    torch.manual_seed(SEED)
    model = GroundingDinoForObjectDetection(config).eval()
    for name, module in model.named_modules():
        if "sampling_offsets" not in name:
            keep_signal(module)
    for name, parameter in model.named_parameters():
        wake(name, parameter)
    norm = model.model.encoder.layers[-1].text_enhancer_layer.layer_norm_after
    norm.weight.mul_(text_scale)
    norm.bias.mul_(text_scale)
    return model


def keep_signal(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.02)
    elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        nn.init.normal_(module.weight, mean=1.0, std=0.05)
        nn.init.normal_(module.bias, std=0.05)


def wake(name: str, parameter: nn.Parameter) -> None:
    """Parameters that start so small that what they steer is invisible."""
    if "sampling_offsets.weight" in name:
        nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
    elif name.endswith(("vision_param", "text_param")):
        nn.init.normal_(parameter, mean=0.3, std=0.05)
    elif "bbox_embed" in name and name.endswith("layers.2.weight"):
        nn.init.normal_(parameter, std=0.6 / math.sqrt(parameter.shape[1]))
    elif name.endswith("relative_position_bias_table"):
        nn.init.normal_(parameter, std=0.2)
    elif name.endswith("level_embed"):
        nn.init.normal_(parameter, std=0.5)
