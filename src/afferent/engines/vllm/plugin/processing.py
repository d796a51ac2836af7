"""vLLM's processor of a model, extended to take items of ours unchanged.

An item of ours skips the model's own processor and its cache: its prompt tokens came with the
reference, and its features stay in the arena. All other media take the stock path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems
from vllm.multimodal.processing.processor import (
    MultiModalProcessingResult,
    PromptReplacement,
    PromptUpdateDetails,
)

from afferent.engines.references import FeaturesReference
from afferent.engines.vllm.plugin import labels, mistral, names
from afferent.engines.vllm.plugin.arena import arena
from afferent.engines.vllm.positions import check_positions
from afferent.errors import FormatError
from afferent.media.families.registry import engine_facts
from afferent.types import Handle, Modality

FIELD = "afferent_{}"
"""Field of a modality: a handle's numbers, its key, and the expected number of rows."""
_ON_CPU = MultiModalBatchedField(keep_on_cpu=True)
_NUM_HANDLE = 4


def modality_of(fields: Container[str]) -> Modality | None:
    """Return the modality whose items of ours are among these fields; ``None``: there are none."""
    return next((each for each in Modality if FIELD.format(each) in fields), None)


def pack(reference: FeaturesReference) -> torch.Tensor:
    """Return ``(9,)`` int64: segment, offset, bytes, generation, rows, and the key's four words."""
    handle = reference.handle
    numbers = [handle.segment, handle.offset, handle.nbytes, handle.generation]
    key = torch.frombuffer(bytearray(reference.key), dtype=torch.int64)
    return torch.cat([torch.tensor([*numbers, reference.num_embeds]), key])


def unpack(row: torch.Tensor) -> tuple[bytes, Handle, int]:
    """Return key, handle and the number of rows."""
    segment, offset, nbytes, generation, num_embeds, *_ = row.tolist()
    key = row[_NUM_HANDLE + 1 :].numpy().tobytes()
    return key, Handle(segment, offset, nbytes, generation), num_embeds


class ReferencedItems(ModalityDataItems[Sequence[FeaturesReference], FeaturesReference]):
    """Items of one modality whose features are in the arena. vLLM's processor never sees them."""

    def get_count(self) -> int:
        return len(self.data)

    def get(self, index: int) -> FeaturesReference:
        return self.data[index]

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return {}


def _parsed(modality: str, stock: Any, data: Any) -> Any:
    is_list = isinstance(data, list | tuple) and not isinstance(data, labels.LabelledTuple)
    found = data if is_list else [data]
    num_ours = sum(isinstance(item, FeaturesReference) for item in found)
    if not num_ours:
        parsed = stock(data)
        labels.pass_on(found, parsed)
        return parsed
    if num_ours < len(found):
        raise ValueError(f"some {modality}s of the request came by reference, and some did not")
    if any(item.modality != modality for item in found):
        raise ValueError(f"a reference to something else stands for {modality}")
    return ReferencedItems(list(found), modality)


@functools.cache
def _parser_class(stock: Any) -> Any:
    def get_subparsers(self: Any) -> Mapping[str, Any]:
        stock_ones = stock._get_subparsers(self)
        return {
            modality: functools.partial(_parsed, modality, parse)
            for modality, parse in stock_ones.items()
        }

    return type(stock.__name__, (stock,), {"_get_subparsers": get_subparsers})


@functools.cache
def _info_class(stock: Any) -> Any:
    def get_data_parser(self: Any) -> Any:
        parser = stock.get_data_parser(self)
        parser.__class__ = _parser_class(parser.__class__)
        return parser

    return type(stock.__name__, (stock,), {"get_data_parser": get_data_parser})


@functools.cache
def _processor_class(stock: Any) -> Any:
    def cached_apply(self: Any, inputs: Any, timing_ctx: Any) -> MultiModalProcessingResult:
        forwarded = labels.labels_in(inputs.mm_data_items)
        if not forwarded:
            return apply(self, inputs, timing_ctx)
        try:
            return apply(self, inputs, timing_ctx)
        finally:
            arena("api").leave(forwarded)

    def apply(self: Any, inputs: Any, timing_ctx: Any) -> MultiModalProcessingResult:
        items = inputs.mm_data_items
        ours = {
            modality: found.data
            for modality, found in items.items()
            if isinstance(found, ReferencedItems)
        }
        if not ours:
            return stock._cached_apply_hf_processor(self, inputs, timing_ctx)
        _check(ours, self.info)
        left = MultiModalDataItems({k: v for k, v in items.items() if k not in ours})
        uuids = {k: v for k, v in (inputs.mm_uuid_items or {}).items() if k not in ours}
        rest = dataclasses.replace(inputs, mm_data_items=left, mm_uuid_items=uuids)
        if left:
            done = stock._cached_apply_hf_processor(self, rest, timing_ctx)
        else:
            prompt_ids = self._postprocess_prompt(inputs.prompt)
            done = MultiModalProcessingResult(prompt_ids, MultiModalKwargsItems({}), {}, {})
        tokenizer = self.info.get_tokenizer()
        updates = [_replacement(modality, found, tokenizer) for modality, found in ours.items()]
        counts = {modality: len(found) for modality, found in ours.items()}
        return MultiModalProcessingResult(
            prompt_ids=done.prompt_ids,
            kwargs=MultiModalKwargsItems(
                {**done.kwargs, **{k: [_kwargs(item) for item in v] for k, v in ours.items()}}
            ),
            hashes={**done.hashes, **{k: [_name(item) for item in v] for k, v in ours.items()}},
            prompt_updates={
                **done.prompt_updates,
                **self._bind_and_group_updates(updates, counts),
            },
        )

    return type(stock.__name__, (stock,), {"_cached_apply_hf_processor": cached_apply})


def _name(item: FeaturesReference) -> str:
    return item.name if names.are_stable() else item.name_of_block


def _check(ours: Mapping[str, Sequence[FeaturesReference]], info: Any) -> None:
    """Check references before they reach the engine core.

    Raises:
        ValueError: A reference would end the engine core, or the features are not those that this
            vLLM would compute; a client's error to vLLM.
    """
    model_config = info.ctx.model_config
    if getattr(model_config.multimodal_config, "mm_processor_kwargs", None):
        raise ValueError(
            "this vLLM was started with --mm-processor-kwargs, which Afferent does not know of: "
            "leave it out, or have Afferent start vLLM, with --engine-args"
        )
    if "video" in ours and getattr(model_config.multimodal_config, "video_pruning_rate", None):
        raise ValueError(
            "this vLLM was started with --video-pruning-rate, so that Afferent needs "
            "--engine-video-bytes"
        )
    names = engine_facts(model_config.hf_config.model_type).position_features
    vision = getattr(info.get_hf_config(), "vision_config", None)
    merge_size = getattr(vision, "spatial_merge_size", 1)
    try:
        for item in (item for found in ours.values() for item in found):
            mistral.check_format(item, info.ctx.tokenizer)
            check_positions(item, names, merge_size=merge_size)
    except FormatError as error:
        raise ValueError(f"this server takes media from Afferent only: {error}") from error


def _replacement(
    modality: str, found: Sequence[FeaturesReference], tokenizer: Any
) -> PromptReplacement:
    def content(index: int) -> PromptUpdateDetails:
        item = found[index]
        if len(item.prompt) == 1:  # rows alone need no mask, which has a byte for each row
            return PromptUpdateDetails.from_seq(item.token_ids())
        number: Sequence[int] = ()
        if item.is_numbered:
            number = tokenizer.encode(str(index), add_special_tokens=False)
        return PromptUpdateDetails.select_token_id(item.token_ids(number), item.embed)

    return PromptReplacement(
        modality=modality, target=lambda index: [*found[index].marker], replacement=content
    )


def _kwargs(item: FeaturesReference) -> MultiModalKwargsItem:
    small = {name: torch.tensor(value) for name, value in item.small.items()}
    data = {FIELD.format(item.modality): pack(item), **small}
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(value, _ON_CPU) for name, value in data.items()}
    )


def factories(stock: Any) -> Any:
    """Return the factories of a model's processor (``_processor_factory``), extended to take our
    items.

    The stock factories may be classes or functions; the objects that they return get a class of
    ours.
    """

    def make_info(ctx: Any) -> Any:
        mistral.open_handles(ctx.tokenizer)
        info = stock.info(ctx)
        info.__class__ = _info_class(info.__class__)
        return info

    def make_processor(info: Any, dummy_inputs: Any) -> Any:
        processor = stock.processor(info, dummy_inputs)
        processor.__class__ = _processor_class(processor.__class__)
        return processor

    return dataclasses.replace(stock, info=make_info, processor=make_processor)
