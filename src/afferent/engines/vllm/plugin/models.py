"""vLLM's models with an encoder that reads its input from the arena.

Every multimodal model of vLLM is registered anew, as a subclass of itself that is created when it
is loaded. vLLM's questions about a model's properties go to the stock class.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.model_executor.models import registry as vllm_registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.utils import group_and_batch_mm_items

from afferent.engines import quarantine
from afferent.engines.vllm.plugin.arena import Gone, arena
from afferent.engines.vllm.plugin.counting import ITEMS, push_counts
from afferent.engines.vllm.plugin.embeddings import KeptEmbeddings
from afferent.engines.vllm.plugin.features import FeatureReader, in_rows
from afferent.engines.vllm.plugin.processing import FIELD, factories, unpack
from afferent.engines.vllm.plugin.step import FeaturesLost, Step, running_step
from afferent.engines.vllm.plugin.step_reader import StepReader
from afferent.errors import AfferentError
from afferent.store.block import codec
from afferent.types import ContentKey, Handle, Modality

T = TypeVar("T")

log = logging.getLogger("vllm.afferent")

_LOOK_AGAIN_S = 1.0


def register() -> None:
    """Replace each multimodal model that vLLM knows by a subclass."""
    models = vllm_registry.ModelRegistry.models
    for arch in vllm_registry._MULTIMODAL_MODELS:
        stock = models.get(arch)
        if isinstance(stock, vllm_registry._LazyRegisteredModel) and not isinstance(stock, _Lazy):
            models[arch] = _Lazy(stock.module_name, stock.class_name)


@dataclasses.dataclass(frozen=True)
class _Lazy(vllm_registry._LazyRegisteredModel):
    """Model that has not been imported; its properties are the stock one's."""

    def load_model_cls(self) -> Any:
        return subclass(super().load_model_cls())


@functools.cache
def subclass(stock: Any) -> Any:
    """Return the subclass of a model that also takes references."""
    if not hasattr(stock, "_processor_factory") or not hasattr(stock, "embed_multimodal"):
        return stock

    def make(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        compilation = vllm_config.compilation_config
        if getattr(compilation, "cudagraph_mm_encoder", False):
            raise ValueError("Afferent: cudagraph_mm_encoder goes around the arena; leave it off")
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self._afferent = _Encoder(self, vllm_config)

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        return self._afferent.embed(functools.partial(stock.embed_multimodal, self), kwargs)

    members = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__init__": make,
        "embed_multimodal": embed_multimodal,
        "_processor_factory": factories(stock._processor_factory),
    }
    return type(stock.__name__, (stock,), members)


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    """Item of a batch, as the API process has packed it."""

    key: bytes
    handle: Handle
    num_embeds: int


class _Encoder:
    """Stage before a model's encoder: it converts references into the encoder's input.

    Invariants:
        - An item gets as many rows as its placeholder has positions.
        - All ranks encode the same items: an item that one rank lacks is missing on all.
        - Features do not change while they are read: the engine core has pinned them for the step,
          or else, in an engine without our connector, this process.
        - In an engine with our connector, an item that can't be encoded ends the step before
          anything is computed for it. In another one it gets zeros, and its answer is refused.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model_config = vllm_config.model_config
        self._width, self._dtype = 0, self._model_config.dtype
        self._reader = FeatureReader(model, self._model_config)
        self._steps: StepReader | None = None
        lora = getattr(vllm_config, "lora_config", None)
        # With LoRA in the encoder, embeddings depend on an adapter, which is unknown here.
        self._may_keep = not getattr(lora, "enable_tower_connector_lora", False)
        self._kept: KeptEmbeddings | None = None
        threading.Thread(target=self._begin, name="afferent-begin", daemon=True).start()

    def embed(self, stock: Any, kwargs: dict[str, Any]) -> Any:
        """Return the embeddings of a batch of items of one modality, as the stock model does.

        Raises:
            FeaturesLost: An item can't be encoded, in an engine with our connector.
        """
        modality = next((each for each in Modality if FIELD.format(each) in kwargs), None)
        if modality is None:
            return self._noted(stock(**kwargs))
        items = [_Item(*unpack(row)) for row in kwargs[FIELD.format(modality)]]
        found = self._found([ContentKey(item.key) for item in items])
        found = _of_all_ranks(
            [
                each if each is not None and len(each) == item.num_embeds else None
                for each, item in zip(found, items, strict=True)
            ]
        )
        missing = [index for index, embeddings in enumerate(found) if embeddings is None]
        ITEMS.labels("found").inc(len(found) - len(missing))
        if missing:
            made = self._encode(modality, [items[index] for index in missing], stock)
            for index, embeddings in zip(missing, made, strict=True):
                found[index] = embeddings
        return found

    def _found(self, keys: Sequence[ContentKey]) -> list[torch.Tensor | None]:
        if self._kept is None:
            return [None] * len(keys)
        return self._kept.find(keys, self._reader.device)

    def _encode(self, modality: Modality, items: Sequence[_Item], stock: Any) -> list[torch.Tensor]:
        """Encode items from features."""
        source, step, start_s = arena("worker"), running_step(), time.monotonic()
        with source.request("encode") as request:
            if step is None:
                inputs = self._pinned_inputs(request, modality, items)
            else:
                inputs = self._inputs_of(step, modality, items)
            inputs = _of_all_ranks(inputs)
            num_lost = sum(each is None for each in inputs)
            ITEMS.labels("lost").inc(num_lost)
            ITEMS.labels("encoded").inc(len(inputs) - num_lost)
            if step is not None and num_lost:
                raise FeaturesLost(f"{num_lost} items of the step can't be read")
            embeddings = self._embeddings(stock, items, inputs, has_names=step is not None)
            if self._kept is not None:
                found = {
                    ContentKey(item.key): (
                        item.handle if step is None else step.items[item.key].handle,
                        rows,
                    )
                    for item, rows, each in zip(items, embeddings, inputs, strict=True)
                    if each is not None
                }
                if step is None or source.pin_blocks(request, [each for each, _ in found.values()]):
                    self._kept.publish(request, found, start_s=start_s)
        return embeddings

    def _inputs_of(self, step: Step, modality: Modality, items: Sequence[_Item]) -> list[Any]:
        """Return the inputs of items that the engine core has pinned; ``None`` for a lost item."""
        if self._steps is None:
            self._steps = StepReader(arena("worker").store)
        self._steps.follow(step)
        inputs: list[Any] = []
        for item in items:
            try:
                block = self._steps.block(step, item.key)
                inputs.append(self._input(modality, codec.view(block, tensors="torch"), item))
                self._steps.check_core()
            except FeaturesLost as error:
                log.warning("an item is lost: %s", error)
                inputs.append(None)
            except Exception:  # the features are what the store has: others would fail likewise
                log.exception("features could not be read")
                quarantine.put(arena("worker").store, item.key)
                inputs.append(None)
        return inputs

    def _pinned_inputs(self, request: str, modality: Modality, items: Sequence[_Item]) -> list[Any]:
        """Return the inputs of items that this process pins; ``None`` for a lost item."""
        source = arena("worker")
        are_there = source.pin(request, [(item.key, item.handle) for item in items])
        inputs: list[Any] = [None] * len(items)
        for index, (item, is_there) in enumerate(zip(items, are_there, strict=True)):
            if not is_there:
                continue
            try:
                inputs[index] = self._input(modality, source.view(item.handle), item)
            except Gone:
                continue
            except Exception:  # an error in one item must not end the engine
                log.exception("features could not be read")
                source.disown(item.key)
        return inputs

    def _input(self, modality: Modality, tree: Any, item: _Item) -> Any:
        """Return the stock processor's output for one item, on the device, in private tensors."""
        inputs = self._reader.inputs(modality, tree)
        fields = self._processor._get_mm_fields_config(inputs, {})
        found: Any = MultiModalKwargsItems.from_hf_inputs(in_rows(inputs, fields), fields)
        (made,) = found[modality]
        return made

    def _embeddings(
        self, stock: Any, items: Sequence[_Item], inputs: Sequence[Any], *, has_names: bool
    ) -> list[torch.Tensor]:
        """Return as many rows for each item as it has positions, also where the encoder fails.

        Args:
            has_names: Whether results are found again by the items' names.

        Raises:
            FeaturesLost: The encoder fails for an item, and has names. The item is quarantined.
        """
        there = [index for index, each in enumerate(inputs) if each is not None]
        made: dict[int, torch.Tensor] = {}
        try:
            rows = self._run(stock, [inputs[index] for index in there])
            made = dict(zip(there, rows, strict=True))
        except Exception:
            log.exception("the encoder failed on what was made of features")
            made = self._one_by_one(stock, inputs, there) if has_names else {}
        bad = [i for i in there if i not in made or len(made[i]) != items[i].num_embeds]
        for index in bad:
            log.error("the encoder makes no %d rows of an item", items[index].num_embeds)
            if has_names:
                quarantine.put(arena("worker").store, items[index].key)
            else:
                arena("worker").disown(items[index].key)
        if bad and has_names:
            raise FeaturesLost(f"the encoder fails for {len(bad)} items, which are quarantined")
        return [
            made[index] if index in made and index not in bad else self._nothing(item.num_embeds)
            for index, item in enumerate(items)
        ]

    def _one_by_one(
        self, stock: Any, inputs: Sequence[Any], there: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Run the encoder for each item alone; leave out the items for which it fails."""
        made: dict[int, torch.Tensor] = {}
        for index in there:
            try:
                (made[index],) = self._run(stock, [inputs[index]])
            except Exception:
                log.exception("the encoder fails for an item")
        return made

    def _run(self, stock: Any, inputs: list[MultiModalKwargsItem]) -> list[torch.Tensor]:
        """Run the stock encoder in batches, as vLLM groups them."""
        embeddings: list[torch.Tensor] = []
        for _, batch in group_and_batch_mm_items(inputs, device=self._reader.device):
            embeddings += self._noted(stock(**batch))
        return embeddings

    @functools.cached_property
    def _processor(self) -> Any:
        return MULTIMODAL_REGISTRY.create_processor(self._model_config)

    def _begin(self) -> None:
        """Connect as soon as there is a store, which may start later than this worker."""
        while True:
            try:
                source = arena("worker")
            except AfferentError:
                time.sleep(_LOOK_AGAIN_S)
                continue
            break
        publishes = get_tensor_model_parallel_rank() == 0
        if publishes:
            push_counts(source)
        if self._may_keep:
            self._kept = KeptEmbeddings(
                source,
                self._model_config,
                publishes=publishes,
                row_nbytes=lambda: self._num_columns * self._dtype.itemsize,
            )

    @property
    def _num_columns(self) -> int:
        """Columns of embeddings; some models' are wider than their text's."""
        return self._width or int(self._model_config.get_inputs_embeds_size())

    def _noted(self, embeddings: Any) -> Any:
        """Remember the width of embeddings, for lost items."""
        if len(embeddings):
            self._width, self._dtype = embeddings[0].shape[-1], embeddings[0].dtype
        return embeddings

    def _nothing(self, num_embeds: int) -> torch.Tensor:
        log.warning("an item that is lost is encoded as nothing; its answer is refused")
        shape = (num_embeds, self._num_columns)
        return torch.zeros(shape, dtype=self._dtype, device=self._reader.device)


def _of_all_ranks(found: list[T | None]) -> list[T | None]:
    """Drop the items that another rank does not have: all ranks must take the same path."""
    group = get_tp_group()
    if group.world_size == 1:
        return found
    have = torch.tensor([each is not None for each in found], dtype=torch.int32)
    torch.distributed.all_reduce(have, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return [each if yes else None for each, yes in zip(found, have.tolist(), strict=True)]
