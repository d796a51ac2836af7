"""vLLM's models, with an encoder that finds its input in the arena.

Every multimodal model of vLLM is registered anew, as a subclass of itself that is made when it is
loaded. What vLLM asks about a model it asks the stock one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from vllm.model_executor.models import registry as vllm_registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.utils import group_and_batch_mm_items

from afferent.types import Modality
from afferent.engine.vllm.plugin.arena import Gone, arena
from afferent.engine.vllm.plugin.features import FeatureReader
from afferent.engine.vllm.plugin.processing import FIELD, factories, unpack

log = logging.getLogger("vllm.afferent")


def register() -> None:
    """Put a subclass in the place of each multimodal model that vLLM knows."""
    models = vllm_registry.ModelRegistry.models
    for arch in vllm_registry._MULTIMODAL_MODELS:
        stock = models.get(arch)
        if isinstance(stock, vllm_registry._LazyRegisteredModel) and not isinstance(stock, _Lazy):
            models[arch] = _Lazy(stock.module_name, stock.class_name)


@dataclasses.dataclass(frozen=True)
class _Lazy(vllm_registry._LazyRegisteredModel):
    """A model that has not been imported; its properties are the stock one's."""

    def load_model_cls(self) -> type:
        return subclass(super().load_model_cls())


@functools.cache
def subclass(stock: type) -> type:
    """The model that takes references, too."""
    if not hasattr(stock, "_processor_factory") or not hasattr(stock, "embed_multimodal"):
        return stock

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        compilation = vllm_config.compilation_config
        if getattr(compilation, "cudagraph_mm_encoder", False):
            raise ValueError("Afferent: cudagraph_mm_encoder goes around the arena; leave it off")
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)  # type: ignore[misc]
        self._afferent = _Encoder(self, vllm_config)

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        return self._afferent.embed(functools.partial(stock.embed_multimodal, self), kwargs)  # type: ignore[attr-defined]

    members = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__init__": __init__,
        "embed_multimodal": embed_multimodal,
        "_processor_factory": factories(stock._processor_factory),
    }
    return type(stock.__name__, (stock,), members)


class _Encoder:
    """What comes before a model's encoder: handles become its input."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model_config = vllm_config.model_config
        self._width = 0
        self._dtype = self._model_config.dtype
        self._reader = FeatureReader(model, self._model_config.model)

    def embed(self, stock: Any, kwargs: dict[str, Any]) -> Any:
        """The embeddings of a batch of items of one modality, as the stock model gives them."""
        modality = next((each for each in Modality if FIELD.format(each) in kwargs), None)
        if modality is None:
            return self._noted(stock(**kwargs))
        rows = kwargs.pop(FIELD.format(modality))
        found: list[torch.Tensor] = []
        for row in rows:
            key, handle, num_embeds = unpack(row)
            try:
                with arena("worker").features(key, handle) as tree:
                    (embeddings,) = self._noted(stock(**self._batch(modality, tree)))
                    del tree
                if embeddings.shape[0] != num_embeds:
                    raise ValueError(f"{embeddings.shape[0]} rows for {num_embeds} places")
            except Gone as error:
                log.warning("an item is encoded as nothing, and its answer refused: %s", error)
                embeddings = self._nothing(num_embeds)
            found.append(embeddings)
        return found

    def _batch(self, modality: Modality, tree: Any) -> dict[str, Any]:
        """What the stock encoder is called with for one item."""
        inputs = self._reader.inputs(modality, tree)
        fields = self._processor._get_mm_fields_config(inputs, {})
        items: Any = MultiModalKwargsItems.from_hf_inputs(inputs, fields)
        (item,) = items[modality]
        ((_, batch),) = group_and_batch_mm_items(
            [MultiModalKwargsItem(item)], device=self._reader.device
        )
        return dict(batch)

    @functools.cached_property
    def _processor(self) -> Any:
        return MULTIMODAL_REGISTRY.create_processor(self._model_config)

    def _noted(self, embeddings: Any) -> Any:
        """Remember how wide they are, for an item that is lost."""
        if len(embeddings):
            self._width, self._dtype = embeddings[0].shape[-1], embeddings[0].dtype
        return embeddings

    def _nothing(self, num_embeds: int) -> torch.Tensor:
        width = self._width or self._model_config.get_inputs_embeds_size()
        return torch.zeros((num_embeds, width), dtype=self._dtype, device=self._reader.device)
