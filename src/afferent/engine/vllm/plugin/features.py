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
        return next(self._model.parameters()).device  # type: ignore[no-any-return]

    @functools.cached_property
    def _family(self) -> AnyFamily:
        family = describe(self._folder)
        if family is None:
            raise ValueError("features came for a model that Afferent makes none for")
        return family

    @functools.cached_property
    def _normalizes(self) -> bool:
        """Whether the model normalizes pixels itself, and wants bytes."""
        norm = getattr(getattr(self._model, "visual", None), "input_norm", None)
        return getattr(norm, "input_dtype", None) == torch.uint8

    def inputs(self, modality: Modality, tree: dict[str, Any]) -> BatchFeature:
        """Private tensors, on the device, by the names that the model's own processor uses."""
        prompt = tree.pop("prompt", None)
        del prompt
        on_device = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in tree.items()
        }
        family = self._family
        if self._normalizes and isinstance(family, QwenVlFamily):
            name = _PATCHES[modality]
            on_device[name] = family.repeated(on_device[name])
            return BatchFeature(on_device)
        return BatchFeature(family.model_inputs(on_device))
