"""Small detectors of each family: published structure and settings, small sizes, seeded random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    CLIPTokenizer,
    ConditionalDetrConfig,
    ConditionalDetrForObjectDetection,
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
    DFineConfig,
    DFineForObjectDetection,
    HGNetV2Config,
    Owlv2Config,
    Owlv2ForObjectDetection,
    OwlViTConfig,
    OwlViTForObjectDetection,
    PreTrainedModel,
    ResNetConfig,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    RTDetrV2Config,
    RTDetrV2ForObjectDetection,
    YolosConfig,
    YolosForObjectDetection,
)

import tiny_clip_tokenizer
from family_weights import fan_in_init, spread

LABELS = ["person", "tree", "traffic light", "house", "sky"]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CLIP_NUMBERS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SHORT_PX, LONG_PX = 96, 160
SQUARE_PX = 96
OWL_PX, OWLV2_PX, OWL_PATCH_PX = 96, 80, 16
TEXT_LENGTH = 16

# Runs the model on its pictures: how the heads are set.
Run = Callable[[], object]


@dataclass(frozen=True)
class TinyDetector:
    """`build` gives the model; `finish` sets its heads so that scores spread, given a call that runs the pictures."""

    seed: int
    build: Callable[[], PreTrainedModel]
    finish: Callable[[PreTrainedModel, Run], None]
    preprocessor: dict
    prompt: str | None = None

    def tokenizer(self) -> CLIPTokenizer | None:
        return tiny_clip_tokenizer.build(pad_token="!", max_length=TEXT_LENGTH) if self.prompt else None


def labelled() -> dict:
    return {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}


def resnet(hidden_sizes: list[int], out_features: list[str]) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=12,
        hidden_sizes=hidden_sizes,
        depths=[1] * len(hidden_sizes),
        layer_type="basic",
        out_features=out_features,
    )


def short_resnet() -> ResNetConfig:
    """Stride 16: with 32 a narrow picture would have five places to look at."""
    return resnet([12, 16, 32], ["stage3"])


def transformer(queries: int) -> dict:
    return {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_queries": queries,
        "dropout": 0.0,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        **labelled(),
    }


def detr() -> PreTrainedModel:
    return DetrForObjectDetection(DetrConfig(backbone_config=short_resnet(), **transformer(20)))


def conditional_detr() -> PreTrainedModel:
    return ConditionalDetrForObjectDetection(ConditionalDetrConfig(backbone_config=short_resnet(), **transformer(20)))


def tell_queries_apart(model: PreTrainedModel) -> None:
    """Conditional DETR's queries give nearly the same answer where their embeddings weigh little."""
    with torch.no_grad():
        model.model.query_position_embeddings.weight.mul_(3.0)


def deformable_detr() -> PreTrainedModel:
    backbone = resnet([12, 16, 24, 32], ["stage2", "stage3", "stage4"])
    return DeformableDetrForObjectDetection(DeformableDetrConfig(backbone_config=backbone, **transformer(20)))


def yolos() -> PreTrainedModel:
    config = YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=[64, 96],
        num_detection_tokens=20,
        use_mid_position_embeddings=True,
        **labelled(),
    )
    return YolosForObjectDetection(config)


def hybrid() -> dict:
    """What RT-DETR and D-FINE share."""
    return {
        "encoder_hidden_dim": 32,
        "encoder_in_channels": [16, 24, 32],
        "encoder_ffn_dim": 48,
        "encoder_attention_heads": 4,
        "hidden_expansion": 0.5,
        "d_model": 32,
        "num_queries": 20,
        "decoder_in_channels": [32, 32, 32],
        "decoder_ffn_dim": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "num_denoising": 10,
        **labelled(),
    }


def rt_detr_backbone() -> RTDetrResNetConfig:
    return RTDetrResNetConfig(
        embedding_size=12,
        hidden_sizes=[12, 16, 24, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        downsample_in_first_stage=False,
        out_features=["stage2", "stage3", "stage4"],
    )


def rt_detr() -> PreTrainedModel:
    return RTDetrForObjectDetection(RTDetrConfig(backbone_config=rt_detr_backbone(), **hybrid()))


def rt_detr_v2() -> PreTrainedModel:
    return RTDetrV2ForObjectDetection(RTDetrV2Config(backbone_config=rt_detr_backbone(), **hybrid()))


def d_fine() -> PreTrainedModel:
    backbone = HGNetV2Config(
        stem_channels=[3, 8, 12],
        stage_in_channels=[12, 12, 16, 24],
        stage_mid_channels=[8, 8, 12, 12],
        stage_out_channels=[12, 16, 24, 32],
        hidden_sizes=[12, 16, 24, 32],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
        stage_light_block=[False, False, True, True],
        use_learnable_affine_block=True,
        out_features=["stage2", "stage3", "stage4"],
    )
    config = DFineConfig(
        backbone_config=backbone, decoder_n_points=[3, 6, 3], depth_mult=0.34, lqe_hidden_dim=16, **hybrid()
    )
    return DFineForObjectDetection(config)


def owl_parts(image_size: int) -> dict:
    tokenizer = tiny_clip_tokenizer.build(pad_token="!", max_length=TEXT_LENGTH)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": TEXT_LENGTH,
        "pad_token_id": 0,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": image_size,
        "patch_size": OWL_PATCH_PX,
    }
    return {"text_config": text, "vision_config": vision, "projection_dim": 32}


def owlvit() -> PreTrainedModel:
    return OwlViTForObjectDetection(OwlViTConfig(**owl_parts(OWL_PX)))


def owlv2() -> PreTrainedModel:
    return Owlv2ForObjectDetection(Owlv2Config(**owl_parts(OWLV2_PX)))


# --- Heads ---


def last_layers(head: nn.Module) -> list[nn.Linear]:
    """The last linear layer of a head, or of each head in a list."""
    if isinstance(head, nn.ModuleList):
        return [layer for part in head for layer in last_layers(part)]
    return [[m for m in head.modules() if isinstance(m, nn.Linear)][-1]]


def finish_plain(model: PreTrainedModel, run: Run) -> None:
    """DETR, conditional DETR, YOLOS: one class head, one box head."""
    softmax = model.config.model_type in ("detr", "yolos")
    if hasattr(model, "model"):
        # What the backbone finds everywhere would drown what it finds at one place.
        spread(model.model.input_projection, run, mean=0.0, std=1.0)
    for layer in last_layers(model.class_labels_classifier):
        spread(layer, run, mean=0.0 if softmax else -1.5, std=1.5)
    for layer in last_layers(model.bbox_predictor):
        spread(layer, run, mean=0.0, std=0.8)


def finish_layers(model: PreTrainedModel, run: Run) -> None:
    """Deformable DETR, RT-DETR: a head for each layer of the decoder, in order, because boxes are refined."""
    decoder = model.model.decoder
    boxes = decoder.bbox_embed if decoder.bbox_embed is not None else model.bbox_embed
    classes = decoder.class_embed if decoder.class_embed is not None else model.class_embed
    for name in ("enc_score_head", "enc_bbox_head"):
        if hasattr(model.model, name):
            for layer in last_layers(getattr(model.model, name)):
                spread(layer, run, mean=0.0, std=1.5 if "score" in name else 0.5)
    for layer in last_layers(boxes):
        spread(layer, run, mean=0.0, std=0.6)
    for layer in last_layers(classes):
        spread(layer, run, mean=-1.5, std=1.5)


def finish_owl(model: PreTrainedModel, run: Run) -> None:
    for layer in last_layers(model.box_head):
        spread(layer, run, mean=0.0, std=0.6)
    # logits = (cosine + shift) * (elu(scale) + 1)
    spread(model.class_head.logit_shift, run, mean=-0.3, std=0.1)
    spread(model.class_head.logit_scale, run, mean=4.0, std=0.5)


# --- Settings, with the keys that the published checkpoints have ---


def old_detr_settings(extractor: str) -> dict:
    return {
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": extractor,
        "format": "coco_detection",
        **IMAGENET,
        "max_size": LONG_PX,
        "size": SHORT_PX,
    }


def new_detr_settings(processor: str) -> dict:
    return {
        "do_convert_annotations": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "format": "coco_detection",
        **IMAGENET,
        "image_processor_type": processor,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": LONG_PX, "shortest_edge": SHORT_PX},
    }


def rt_detr_settings() -> dict:
    return {
        "do_convert_annotations": True,
        "do_normalize": False,
        "do_pad": False,
        "do_rescale": True,
        "do_resize": True,
        "format": "coco_detection",
        **IMAGENET,
        "image_processor_type": "RTDetrImageProcessor",
        "pad_size": None,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": SQUARE_PX, "width": SQUARE_PX},
    }


def owlvit_settings() -> dict:
    return {
        "crop_size": {"height": OWL_PX, "width": OWL_PX},
        "do_center_crop": False,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        **CLIP_NUMBERS,
        "image_processor_type": "OwlViTImageProcessor",
        "processor_class": "OwlViTProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": OWL_PX, "width": OWL_PX},
    }


def owlv2_settings() -> dict:
    return {
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        **CLIP_NUMBERS,
        "image_processor_type": "Owlv2ImageProcessor",
        "processor_class": "Owlv2Processor",
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": OWLV2_PX, "width": OWLV2_PX},
    }


OWL_PROMPT = "a tree. a red bus. a small house."
DETECTORS = {
    "detr": TinyDetector(41, detr, finish_plain, old_detr_settings("DetrFeatureExtractor")),
    "conditional_detr": TinyDetector(
        51, conditional_detr, finish_plain, new_detr_settings("ConditionalDetrImageProcessor")
    ),
    "deformable_detr": TinyDetector(
        37, deformable_detr, finish_layers, old_detr_settings("DeformableDetrFeatureExtractor")
    ),
    "yolos": TinyDetector(50, yolos, finish_plain, old_detr_settings("YolosFeatureExtractor")),
    "rt_detr": TinyDetector(43, rt_detr, finish_layers, rt_detr_settings()),
    "rt_detr_v2": TinyDetector(37, rt_detr_v2, finish_layers, rt_detr_settings()),
    "d_fine": TinyDetector(32, d_fine, finish_layers, rt_detr_settings()),
    "owlvit": TinyDetector(59, owlvit, finish_owl, owlvit_settings(), OWL_PROMPT),
    "owlv2": TinyDetector(46, owlv2, finish_owl, owlv2_settings(), OWL_PROMPT),
}


def build(tiny: TinyDetector) -> PreTrainedModel:
    """Seeded, in evaluation mode; heads not yet set."""
    torch.manual_seed(tiny.seed)
    model = tiny.build().eval()
    fan_in_init(model)
    if model.config.model_type == "conditional_detr":
        tell_queries_apart(model)
    return model
