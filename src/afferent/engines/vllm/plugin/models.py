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
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_items

from afferent.engines import quarantine
from afferent.engines.vllm.plugin import speech
from afferent.engines.vllm.plugin.arena import Gone, arena
from afferent.engines.vllm.plugin.counting import ITEMS, push_counts
from afferent.engines.vllm.plugin.embeddings import KeptEmbeddings
from afferent.engines.vllm.plugin.features import FeatureReader, kwargs_item
from afferent.engines.vllm.plugin.names import is_ours
from afferent.engines.vllm.plugin.processing import FIELD, factories, modality_of, unpack
from afferent.engines.vllm.plugin.step import FeaturesLost, Step, end_engine, running_step
from afferent.engines.vllm.plugin.step_reader import StepReader
from afferent.engines.vllm.plugin.transfer import Stopwatch
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
    if hasattr(stock, "get_speech_to_text_config"):
        members["get_speech_to_text_config"] = speech.config_of(stock)
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
        - In an engine with our connector, an item that can't be encoded ends the engine before
          anything is computed for it. In another one it gets zeros, and its answer is refused.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model_config = vllm_config.model_config
        self._has_connector = is_ours(getattr(vllm_config, "ec_transfer_config", None))
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
        modality = modality_of(kwargs)
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
            encode = self._encode_named if self._has_connector else self._encode_or_nothing
            made = encode(modality, [items[index] for index in missing], stock)
            for index, embeddings in zip(missing, made, strict=True):
                found[index] = embeddings
        return found

    def _found(self, keys: Sequence[ContentKey]) -> list[torch.Tensor | None]:
        kept = self._kept
        try:
            return kept.find(keys, self._reader.device) if kept else [None] * len(keys)
        except Exception:  # the other ranks wait for what this one has found
            log.exception("embeddings were not looked for")
            return [None] * len(keys)

    # In an engine with our connector

    def _encode_named(
        self, modality: Modality, items: Sequence[_Item], stock: Any
    ) -> list[torch.Tensor]:
        """Encode items that the engine core has pinned, or end the engine."""
        step, started = running_step(), Stopwatch(self._reader.device)
        if step is None:
            raise FeaturesLost("items are to be encoded outside of a step")
        inputs = self._all_or_end(step, self._inputs_of(step, modality, items))
        rows = self._all_or_end(step, self._rows(step, stock, items, inputs))
        if self._kept is not None:
            self._kept.publish(
                {
                    ContentKey(item.key): (step.items[item.key].handle, each)
                    for item, each in zip(items, rows, strict=True)
                },
                started,
            )
        return rows

    def _all_or_end(self, step: Step, found: list[T | None]) -> list[T]:
        """Return what all ranks have of all items; else end the engine."""
        there = [each for each in _of_all_ranks(found) if each is not None]
        if num_lost := len(found) - len(there):
            ITEMS.labels("lost").inc(num_lost)
            end_engine(step, f"{num_lost} items of the step can't be encoded")
        return there

    def _inputs_of(self, step: Step, modality: Modality, items: Sequence[_Item]) -> list[Any]:
        """Return the inputs of pinned items; ``None`` for a lost item."""
        inputs: list[Any] = []
        for item in items:
            try:
                if self._steps is None:
                    self._steps = StepReader(arena("worker").store)
                self._steps.follow(step)
                block = self._steps.block(step, item.key)
                inputs.append(self._input(modality, codec.view(block, tensors="torch"), item))
                self._steps.check_core()
            except Exception as error:
                log.exception("features could not be read")
                is_of_item = not isinstance(error, FeaturesLost | AfferentError | OSError)
                if is_of_item and self._may_be_of_an_item(error):
                    # torch raises a `RuntimeError` where page-locked memory is short, too.
                    is_certain = not isinstance(error, RuntimeError)
                    self._quarantine(step, item, is_certain=is_certain)
                return [None] * len(items)
        return inputs

    def _rows(
        self, step: Step, stock: Any, items: Sequence[_Item], inputs: list[Any]
    ) -> list[torch.Tensor | None]:
        """Return the embeddings of each item; ``None``: the encoder fails for it."""
        is_alone = get_tp_group().world_size == 1
        rows: list[torch.Tensor | None] = [None] * len(items)
        try:
            rows = list(self._run(stock, inputs))
        except Exception as error:
            log.exception("the encoder fails")
            if not self._may_be_of_an_item(error):
                return rows
            if is_alone:  # the other ranks would have to do the same
                rows = [self._alone(stock, each) for each in inputs]
        for index, (item, each) in enumerate(zip(items, rows, strict=True)):
            if each is None or len(each) != item.num_embeds:
                log.error("the encoder makes no %d rows of an item", item.num_embeds)
                rows[index] = None
                is_certain = is_alone or len(items) == 1
                self._quarantine(step, item, is_certain=is_certain)
        ITEMS.labels("encoded").inc(sum(each is not None for each in rows))
        return rows

    def _alone(self, stock: Any, inputs: Any) -> torch.Tensor | None:
        """Return the embeddings of one item; ``None``: the encoder fails for it."""
        try:
            (rows,) = self._run(stock, [inputs])
        except Exception:
            log.exception("the encoder fails for an item")
            return None
        return rows

    def _quarantine(self, step: Step, item: _Item, *, is_certain: bool) -> None:
        store = arena("worker").store
        quarantine.put(store, item.key, engine=step.engine, is_certain=is_certain)

    def _may_be_of_an_item(self, error: Exception) -> bool:
        """Whether an item may be the cause: no lack of memory, and no device that is broken."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return False
        try:
            torch.zeros(1, device=self._reader.device).add_(1).item()
        except Exception:
            log.exception("the device is broken")
            return False
        return True

    # In any other engine

    def _encode_or_nothing(
        self, modality: Modality, items: Sequence[_Item], stock: Any
    ) -> list[torch.Tensor]:
        """Encode items that this process pins; return zeros for lost items."""
        source, started = arena("worker"), Stopwatch(self._reader.device)
        with source.request("encode") as request:
            inputs = _of_all_ranks(self._pinned_inputs(request, modality, items))
            num_lost = sum(each is None for each in inputs)
            ITEMS.labels("lost").inc(num_lost)
            ITEMS.labels("encoded").inc(len(inputs) - num_lost)
            embeddings = self._embeddings(stock, items, inputs)
            if self._kept is not None:
                self._kept.publish(
                    {
                        ContentKey(item.key): (item.handle, rows)
                        for item, rows, each in zip(items, embeddings, inputs, strict=True)
                        if each is not None
                    },
                    started,
                )
        return embeddings

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

    def _embeddings(
        self, stock: Any, items: Sequence[_Item], inputs: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Return as many rows for each item as it has positions, also where the encoder fails."""
        try:
            made = iter(self._run(stock, [each for each in inputs if each is not None]))
            return [
                self._checked(next(made), item) if each is not None else self._nothing(item)
                for each, item in zip(inputs, items, strict=True)
            ]
        except Exception:
            log.exception("the encoder failed on what was made of features")
            for item in items:
                arena("worker").disown(item.key)
            return [self._nothing(item) for item in items]

    def _checked(self, embeddings: torch.Tensor, item: _Item) -> torch.Tensor:
        """Replace embeddings with a wrong number of rows by zeros: they would end the engine."""
        if len(embeddings) == item.num_embeds:
            return embeddings
        log.error("the encoder gives %d rows for %d places", len(embeddings), item.num_embeds)
        arena("worker").disown(item.key)
        return self._nothing(item)

    # In both

    def _input(self, modality: Modality, tree: Any, item: _Item) -> Any:
        """Return the stock processor's output for one item, on the device, in private tensors."""
        return kwargs_item(self._processor, modality, self._reader.inputs(modality, tree))

    def _run(self, stock: Any, inputs: list[MultiModalKwargsItem]) -> list[torch.Tensor]:
        """Run the stock encoder in batches, as vLLM groups them."""
        embeddings: list[torch.Tensor] = []
        device = self._reader.device
        is_gpu = device.type == "cuda"
        for _, batch in group_and_batch_mm_items(inputs, device=device, pin_memory=is_gpu):
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
                arena("worker-embeddings"),
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

    def _nothing(self, item: _Item) -> torch.Tensor:
        log.warning("an item that is lost is encoded as nothing; its answer is refused")
        shape = (item.num_embeds, self._num_columns)
        return torch.zeros(shape, dtype=self._dtype, device=self._reader.device)


def _of_all_ranks(found: list[T | None]) -> list[T | None]:
    """Drop the items that another rank does not have: all ranks must take the same path."""
    group = get_tp_group()
    if group.world_size == 1:
        return found
    have = torch.tensor([each is not None for each in found], dtype=torch.int32)
    torch.distributed.all_reduce(have, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return [each if yes else None for each, yes in zip(found, have.tolist(), strict=True)]
