"""What must be replaced in transformers' GroundingDINO so that tracing gives a graph that is right.

Five places of the modelling code cannot be traced as they stand. Each replacement gives the same numbers in PyTorch.

  text masks            isin, cummax and cummin have no ONNX form: compared with `==`, and the largest or smallest
                        over a square of positions
  mask given to BERT    boolean; attention that adds its mask would add 1 in place of masking: made additive here
  padding in Swin       behind Python `if`s that tracing freezes: pad always, perhaps by 0, and slice always
  spatial_shapes        built from a Python list, so a constant of the traced size: built from the traced sizes
  linspace              exported as a division by steps - 1: no numbers where the coarsest features are one wide or
                        high, so wrong boxes for a side of 64 pixels or less

The last two are found in other families too: `torch_export.traceable_transformers` mends them.

    with exportable(model):
        torch.onnx.export(...)
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Iterator
from unittest import mock

import torch
from torch import nn
from transformers.models.grounding_dino import modeling_grounding_dino as dino
from transformers.models.swin import modeling_swin as swin

from torch_export import traceable_transformers

MADE_FOR = "5.24.0"

# The least value of a mask that is added to attention scores: it leaves nothing of what it hides.
HIDDEN = torch.finfo(torch.float32).min


def text_masks(input_ids: torch.Tensor, special_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens see each other (those of one phrase), and each token's place in its phrase."""
    length = input_ids.shape[1]
    places = torch.arange(length, device=input_ids.device)
    special = (input_ids[:, :, None] == special_tokens).any(-1)[:, None, :]
    earlier = (places[None, :] < places[:, None])[None]
    previous = torch.where(special & earlier, places, -1).amax(-1)
    following = torch.where(special & ~earlier, places, length).amin(-1)

    inside = (following != 0) & (following != length - 1) & (following != length)
    same_phrase = following[:, :, None] == following[:, None, :]
    itself = (places[:, None] == places[None, :])[None]
    position_ids = torch.where(inside, places - previous - 1, 0).clamp(min=0)
    return (same_phrase & inside[:, None, :]) | itself, position_ids


def additive_mask(_module: nn.Module, args: tuple) -> tuple:
    """For a hook before BERT: its second argument, true where a token may look, becomes 0 or `HIDDEN`."""
    input_ids, mask, *rest = args
    return (input_ids, torch.where(mask, 0.0, HIDDEN), *rest)


def pad_patches(self: nn.Module, pixel_values: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
    rows, columns = self.patch_size
    padding = (0, (columns - width % columns) % columns, 0, (rows - height % rows) % rows)
    return nn.functional.pad(pixel_values, padding)


def pad_merged(_self: nn.Module, feature: torch.Tensor, height: Any, width: Any) -> torch.Tensor:
    return nn.functional.pad(feature, (0, 0, 0, width % 2, 0, height % 2))


SWIN_LAYER_PAD = swin.SwinLayer.maybe_pad


def pad_windows(self: nn.Module, hidden_states: torch.Tensor, height: Any, width: Any) -> tuple[torch.Tensor, tuple]:
    """The layer's own padding. The layer asks the second result only whether to slice: always."""
    padded, _ = SWIN_LAYER_PAD(self, hidden_states, height, width)
    return padded, (0, 0, 0, 1, 0, 1)


REPLACEMENTS = [
    (dino, "generate_masks_with_special_tokens_and_transfer_map", text_masks),
    (swin.SwinPatchEmbeddings, "maybe_pad", pad_patches),
    (swin.SwinPatchMerging, "maybe_pad", pad_merged),
    (swin.SwinLayer, "maybe_pad", pad_windows),
]


@contextmanager
def exportable(model: nn.Module) -> Iterator[None]:
    """The replacements hold inside; afterwards everything is as it was."""
    with ExitStack() as stack:
        stack.enter_context(traceable_transformers())
        for owner, name, replacement in REPLACEMENTS:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        hook = model.model.text_backbone.register_forward_pre_hook(additive_mask)
        stack.callback(hook.remove)
        yield
