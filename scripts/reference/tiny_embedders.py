"""Small embedders of each family: published structure and settings, small sizes, seeded random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    ConvNextConfig,
    ConvNextModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

import tiny_clip_tokenizer
from family_weights import fan_in_init
from tiny_detectors import CLIP_NUMBERS, IMAGENET

HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SIDE_PX, PATCH_PX = 64, 16
DINOV2_SIDE_PX, DINOV2_PATCH_PX = 56, 14
CLIP_TEXT_LENGTH = 77

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@dataclass(frozen=True)
class TinyEmbedder:
    seed: int
    build: Callable[[], PreTrainedModel]
    preprocessor: dict
    # CLIP with its text half.
    whole: bool = False

    def tokenizer(self) -> CLIPTokenizer | None:
        return clip_tokenizer() if self.whole else None


def clip_tokenizer() -> CLIPTokenizer:
    return tiny_clip_tokenizer.build(pad_token="<|endoftext|>", max_length=CLIP_TEXT_LENGTH)


def dinov2_with_registers() -> PreTrainedModel:
    config = Dinov2WithRegistersConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        # As published: trained at another size than the one it is fed with.
        image_size=70,
        patch_size=DINOV2_PATCH_PX,
        num_register_tokens=4,
    )
    return Dinov2WithRegistersModel(config)


def dinov3_vit() -> PreTrainedModel:
    return DINOv3ViTModel(DINOv3ViTConfig(**SMALL, image_size=SIDE_PX, patch_size=PATCH_PX, num_register_tokens=4))


def vit() -> PreTrainedModel:
    return ViTModel(ViTConfig(**SMALL, image_size=SIDE_PX, patch_size=PATCH_PX), add_pooling_layer=False)


def clip_vision_parts() -> dict:
    return {**SMALL, "image_size": SIDE_PX, "patch_size": PATCH_PX, "projection_dim": 24}


def clip_vision() -> PreTrainedModel:
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**clip_vision_parts()))


def clip() -> PreTrainedModel:
    tokenizer = clip_tokenizer()
    text = {
        **SMALL,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CLIP_TEXT_LENGTH,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=clip_vision_parts(), projection_dim=24))


def siglip_vision() -> PreTrainedModel:
    return SiglipVisionModel(SiglipVisionConfig(**SMALL, image_size=SIDE_PX, patch_size=PATCH_PX))


def convnext() -> PreTrainedModel:
    return ConvNextModel(ConvNextConfig(hidden_sizes=[12, 16, 24, 32], depths=[1, 1, 1, 1], image_size=SIDE_PX))


def swin() -> PreTrainedModel:
    config = SwinConfig(
        image_size=56, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=7, mlp_ratio=2.0
    )
    return SwinModel(config)


def resnet() -> PreTrainedModel:
    config = ResNetConfig(
        embedding_size=12, hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], layer_type="bottleneck"
    )
    return ResNetModel(config)


# --- Settings, with the keys that the published checkpoints have ---


def bit_settings() -> dict:
    return {
        "crop_size": {"height": DINOV2_SIDE_PX, "width": DINOV2_SIDE_PX},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        **IMAGENET,
        "image_processor_type": "BitImageProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": DINOV2_SIDE_PX * 256 // 224},
    }


def dinov3_settings() -> dict:
    return {
        "crop_size": None,
        "data_format": "channels_first",
        "default_to_square": True,
        "device": None,
        "disable_grouping": None,
        "do_center_crop": None,
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        **IMAGENET,
        "image_processor_type": "DINOv3ViTImageProcessorFast",
        "input_data_format": None,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "return_tensors": None,
        "size": {"height": SIDE_PX, "width": SIDE_PX},
    }


def vit_settings() -> dict:
    return {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        **HALVES,
        "image_processor_type": "ViTImageProcessor",
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE_PX, "width": SIDE_PX},
    }


def clip_settings() -> dict:
    return {
        "crop_size": SIDE_PX,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        **CLIP_NUMBERS,
        "resample": 3,
        "size": SIDE_PX,
    }


def siglip_settings() -> dict:
    return {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        **HALVES,
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "SiglipProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE_PX, "width": SIDE_PX},
    }


def convnext_settings() -> dict:
    return {
        "crop_pct": 0.875,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "ConvNextFeatureExtractor",
        **IMAGENET,
        "resample": 3,
        "size": SIDE_PX,
    }


def swin_settings() -> dict:
    return {
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "ViTFeatureExtractor",
        **IMAGENET,
        "resample": 3,
        "size": 56,
    }


EMBEDDERS = {
    "dinov2_with_registers": TinyEmbedder(51, dinov2_with_registers, bit_settings()),
    "dinov3_vit": TinyEmbedder(52, dinov3_vit, dinov3_settings()),
    "vit": TinyEmbedder(53, vit, vit_settings()),
    "clip_vision": TinyEmbedder(54, clip_vision, clip_settings()),
    "clip": TinyEmbedder(55, clip, clip_settings(), whole=True),
    "siglip_vision": TinyEmbedder(56, siglip_vision, siglip_settings()),
    "convnext": TinyEmbedder(57, convnext, convnext_settings()),
    "swin": TinyEmbedder(58, swin, swin_settings()),
    "resnet": TinyEmbedder(59, resnet, convnext_settings()),
}


def build(tiny: TinyEmbedder) -> PreTrainedModel:
    """Seeded, in evaluation mode."""
    torch.manual_seed(tiny.seed)
    model = tiny.build().eval()
    fan_in_init(model)
    return model
