"""Conversion of features in the arena to the inputs of vLLM's encoder of the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import (
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)

from afferent.engines.vllm.plugin.transfer import upload
from afferent.media.families import mistral
from afferent.media.families.entry import EncoderInputs
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import AnyFamily, describe, facts_of
from afferent.types import Modality

_NESTED_NDIM = 5  # prompt, tile, channel, row, column
_PATCHES = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


def folder_of(model_config: Any) -> Path:
    """Return the folder of a model; a model that vLLM knows by its name on a hub has been
    downloaded.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    revision = getattr(model_config, "revision", None)
    return Path(snapshot_download(model_config.model, revision=revision, local_files_only=True))


class FeatureReader:
    """Finishes features on the model's device, as the stock processor would have computed them."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config

    @functools.cached_property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @functools.cached_property
    def _is_far(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device.type != "cpu"

    @functools.cached_property
    def _family(self) -> AnyFamily:
        family = describe(*self._read)
        if family is None:
            raise ValueError("features came for a model that none are made for")
        return family

    @functools.cached_property
    def _convert(self) -> EncoderInputs | None:
        """Conversion to the inputs of vLLM's encoder, where `transformers`' has others."""
        return facts_of(*self._read).encoder_inputs.get("vllm")

    @functools.cached_property
    def _read(self) -> tuple[Path, dict[str, Any] | None]:
        """The model's folder, and its configuration if that is not its ``config.json``."""
        folder = folder_of(self._model_config)
        is_mistrals = self._model_config.hf_config.model_type in mistral.IN_VLLM
        return folder, mistral.config_of(folder) if is_mistrals else None

    @functools.cached_property
    def _normalizes(self) -> bool:
        """Whether the model normalizes pixels itself, and takes bytes."""
        norms = (getattr(module, "input_norm", None) for module in self._model.modules())
        return any(getattr(norm, "input_dtype", None) == torch.uint8 for norm in norms)

    def inputs(self, modality: Modality, tree: dict[str, Any]) -> BatchFeature:
        """Return private tensors by the names of the model's own processor.

        Pixels and samples are on the device. Sizes and the like are not: vLLM brings them there, or
        reads them here, which a copy on the device would delay until all work there is done.
        """
        views = {name: each for name, each in tree.items() if isinstance(each, torch.Tensor)}
        near = {
            name: upload(view, self.device) if self._is_far and _is_large(view) else view
            for name, view in views.items()
        }
        family, made = self._family, near
        name = _PATCHES.get(modality)
        if name is None or not self._normalizes:
            made = family.model_inputs(near)
        elif isinstance(family, QwenVlFamily):
            made = {**near, name: family.repeated(near[name])}
        shared = {_storage(view) for view in views.values()}
        # The memory of a view is reused as soon as its block is unpinned.
        own = {
            name: each.clone() if _storage(each) in shared else each for name, each in made.items()
        }
        dtype = self._model_config.dtype  # in which vLLM gives all floats of a processor
        cast = {
            name: each.to(dtype) if each.is_floating_point() else each for name, each in own.items()
        }
        return BatchFeature(cast if self._convert is None else self._convert(family, cast))


def kwargs_item(processor: Any, modality: Modality, inputs: BatchFeature) -> MultiModalKwargsItem:
    """Return an item as vLLM's processor of the model makes it.

    Args:
        processor: vLLM's processor of the model.
        inputs: The result of `FeatureReader.inputs`.
    """
    fields = processor._get_mm_fields_config(inputs, {})
    found: Any = MultiModalKwargsItems.from_hf_inputs(_in_rows(inputs, fields), fields)
    (made,) = found[modality]
    return made


def _in_rows(inputs: BatchFeature, fields: Mapping[str, Any]) -> BatchFeature:
    """Return the inputs with all tiles in one sequence where vLLM has them so; `transformers`
    groups them by prompt.

    Args:
        inputs: The result of `FeatureReader.inputs`.
        fields: Fields of the model's processor, by name.
    """
    tiles = inputs.get("pixel_values")
    if tiles is None or tiles.ndim < _NESTED_NDIM:
        return inputs
    flat = {name for name, each in fields.items() if isinstance(each.field, MultiModalFlatField)}
    return BatchFeature(
        {name: each.flatten(0, 1) if name in flat else each for name, each in inputs.items()}
    )


def _is_large(view: torch.Tensor) -> bool:
    """Whether a tensor has pixels or samples, in bytes or floats."""
    return view.ndim > 1 and (view.dtype == torch.uint8 or view.is_floating_point())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
