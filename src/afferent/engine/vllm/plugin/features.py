"""From features as they lie in the arena to what vLLM's encoder of the model is called with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature

from afferent.preprocess.families.qwen_vl import QwenVlFamily
from afferent.preprocess.registry import AnyFamily, describe
from afferent.types import Modality

_PATCHES = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


class FeatureReader:
    """Finishes features on the model's device, as the stock processor would have made them."""

    def __init__(self, model: Any, folder: str) -> None:
        self._model, self._folder = model, Path(folder)

    @functools.cached_property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @functools.cached_property
    def _family(self) -> AnyFamily | None:
        """``None``: features are what the model's own processor makes."""
        return describe(self._folder)

    @functools.cached_property
    def _normalizes(self) -> bool:
        """Whether the model normalizes pixels itself, and wants bytes."""
        norm = getattr(getattr(self._model, "visual", None), "input_norm", None)
        return getattr(norm, "input_dtype", None) == torch.uint8

    def inputs(self, modality: Modality, tree: dict[str, Any]) -> BatchFeature:
        """Private tensors, on the device, by the names that the model's own processor uses."""
        views = {name: each for name, each in tree.items() if isinstance(each, torch.Tensor)}
        on_device = {name: view.to(self.device) for name, view in views.items()}
        family = self._family
        if self._normalizes and isinstance(family, QwenVlFamily):
            name = _PATCHES[modality]
            made = {**on_device, name: family.repeated(on_device[name])}
        else:
            made = family.model_inputs(on_device) if family is not None else on_device
            made = _completed(made, family.tokens[modality].embed if family is not None else 0)
        shared = {_storage(view) for view in views.values()}
        # What still is a view would be another's as soon as the pin is gone.
        return BatchFeature(
            {
                name: each.clone() if _storage(each) in shared else each
                for name, each in made.items()
            }
        )


def _completed(made: dict[str, Any], embed_token_id: int) -> dict[str, Any]:
    """With what vLLM adds to a processor's output for one image, whichever model asks for it."""
    pixels = made.get("pixel_values")
    if pixels is None:
        return made
    if "pixel_attention_mask" in made:  # the tiles of one image are a batch of their own
        made = {name: each.squeeze(0) if each.dim() > 3 else each for name, each in made.items()}
        made["pixel_attention_mask"] = made["pixel_attention_mask"].view(
            len(made["pixel_values"]), *made["pixel_attention_mask"].shape[-2:]
        )
    num_tiles = torch.tensor([len(made["pixel_values"])])
    return {
        **made,
        "num_patches": num_tiles,
        "image_num_patches": num_tiles,
        "image_token_id": torch.tensor(embed_token_id),
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
