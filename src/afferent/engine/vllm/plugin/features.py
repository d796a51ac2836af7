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


def folder_of(model_config: Any) -> Path:
    """Of a model, which vLLM may know by its name on a hub: then it has been fetched."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    revision = getattr(model_config, "revision", None)
    return Path(snapshot_download(model_config.model, revision=revision, local_files_only=True))


class FeatureReader:
    """Finishes features on the model's device, as the stock processor would have made them."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config

    @functools.cached_property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @functools.cached_property
    def _family(self) -> AnyFamily:
        family = describe(folder_of(self._model_config))
        if family is None:
            raise ValueError("features came for a model that none are made for")
        return family

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
            made = family.model_inputs(on_device)
        shared = {_storage(view) for view in views.values()}
        # What still is a view would be another's as soon as the pin is gone.
        own = {
            name: each.clone() if _storage(each) in shared else each for name, each in made.items()
        }
        return BatchFeature({**self._beside(modality, own), **own})

    def _beside(self, modality: Modality, made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What vLLM's own processors add to what the model's processor makes: of how many tiles an
        item is, and its token. Fields that the model has not are left out later.
        """
        if modality is not Modality.IMAGE or "pixel_values" not in made:
            return {}
        num_tiles = torch.tensor([len(made["pixel_values"])])
        token = torch.tensor(self._family.tokens[modality].embed)
        return {"num_patches": num_tiles, "image_num_patches": num_tiles, "image_token_id": token}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
