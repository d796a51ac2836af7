"""Decoder that computes all sequences of a step in one pass: one packed row."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from afferent.builtin.engine.model.attention import (
    IMPLEMENTATION,
    Packing,
    Segment,
    SequenceKvCache,
)
from afferent.builtin.engine.model.chunks import SequenceChunk
from afferent.builtin.engine.model.embeddings import Embeddings, PlacedItem
from afferent.builtin.engine.model.filling import FilledItem, Filling, Indices
from afferent.builtin.engine.model.positions import Positions, positions_of
from afferent.errors import UnsupportedModel, UnusableEmbeddings
from afferent.media.families.family import Family
from afferent.media.families.registry import engine_facts

_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Supported layers; others use the KV cache in another way."""
_ROOM_FOR_ANSWER = 64


@dataclass(slots=True, eq=False)
class _State:
    """State of a sequence. ``blocks`` as in `Segment`, up to the end of the last item."""

    filling: Filling
    positions: Positions
    kv_cache: SequenceKvCache
    blocks: torch.Tensor | None


class PackedDecoder:
    """Language model of a decoder-only model."""

    def __init__(self, model: Any, family: Family) -> None:
        """Replace the model's attention.

        Raises:
            UnsupportedModel: Its answers would be wrong here.
        """
        config, text = model.config, model.config.get_text_config()
        if getattr(text, "final_logit_softcapping", None) or getattr(text, "logit_scale", None):
            raise UnsupportedModel(f"the logits of {config.model_type} are not done here")
        self.can_split_items = not engine_facts(config.model_type).items_see_themselves
        if self.can_split_items and "token_type_ids" in inspect.signature(model.forward).parameters:
            raise UnsupportedModel(f"the attention of {config.model_type} is not done here")
        if not set(getattr(text, "layer_types", None) or ()) <= _LAYERS:
            raise UnsupportedModel(f"not all layers of {config.model_type} are done here")
        self._model, self._family = model, family
        self._text = model.get_decoder()
        self._text.set_attn_implementation(IMPLEMENTATION)
        if self._text.config._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModel(f"the attention of {config.model_type} can't be replaced")
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        vision = getattr(config, "vision_config", None)
        self.num_embed_layers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))

    def begin(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> _State:
        """See `Decoder.begin`."""
        filling = Filling(self._family, token_ids, items)
        return _State(
            filling=filling,
            positions=positions_of(self._model, token_ids, filling.items),
            kv_cache=SequenceKvCache(self._capacity_for(len(token_ids))),
            blocks=_blocks(filling.items) if items and not self.can_split_items else None,
        )

    def _capacity_for(self, num_tokens: int) -> int:
        """Return the positions to allocate for a prompt at its start.

        On a CPU, those that are not computed yet cost nothing. On a GPU, they would take memory
        that the scheduler gives to others meanwhile.
        """
        return num_tokens + _ROOM_FOR_ANSWER if self._model.device.type == "cpu" else 0

    def reuse(self, state: _State, source: _State, *, num_tokens: int, is_move: bool) -> None:
        """See `Decoder.reuse`."""
        state.kv_cache.begin_with(source.kv_cache, num_tokens, is_move=is_move)

    @property
    def can_extend(self) -> bool:
        """See `Decoder.can_extend`."""
        return self.can_split_items

    def extend(
        self, state: _State, num_tokens: int, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> None:
        """See `Decoder.extend`."""
        # The items before are computed: they are not needed again.
        state.filling = Filling(self._family, token_ids, items, base=num_tokens)
        state.positions = state.positions.extended(
            self._model, num_tokens, token_ids, state.filling.items
        )

    def check(self, chunk: SequenceChunk, embeddings: Mapping[bytes, Embeddings]) -> None:
        """See `Decoder.check`."""
        for each in chunk.sequence.state.filling.between(chunk.start, chunk.end):
            found = embeddings.get(each.filled.item.key)
            layers = (found.rows, *found.layers) if found else ()
            wanted = [len(each.filled.targets)] * self.num_embed_layers
            if list(map(len, layers)) != wanted:
                raise UnusableEmbeddings(sequence_id=chunk.sequence.sequence_id)

    def logits(
        self, chunks: Sequence[SequenceChunk], embeddings: Mapping[bytes, Embeddings]
    ) -> torch.Tensor:
        """See `Decoder.logits`."""
        row = _Row(chunks, embeddings)
        device = self._model.device
        inputs = self._embed(torch.tensor([row.token_ids], device=device))
        arguments: dict[str, Any] = {}
        if row.rows:
            targets = torch.from_numpy(np.concatenate(row.targets)).to(device)
            inputs[0, targets] = _joined(row.rows, inputs)
            if row.layers:
                is_filled = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=device)
                is_filled[0, targets] = True
                layers = [_joined(each, inputs) for each in zip(*row.layers, strict=True)]
                arguments["visual_pos_masks"] = is_filled
                arguments["deepstack_visual_embeds"] = layers
        states = self._text(
            inputs_embeds=inputs,
            position_ids=row.positions.to(device),
            packing=Packing(row.segments),
            use_cache=False,
            **arguments,
        ).last_hidden_state
        last = torch.tensor(row.last, dtype=torch.int64, device=device)
        logits: torch.Tensor = self._head(states[0, last])
        return logits


class _Row:
    """Chunks of a step, one behind the other.

    Attributes:
        token_ids: 0 at positions of embeddings: not every model has a row for its own media tokens.
        targets: The indices in the row that embeddings go to, in order.
        rows: The embeddings that go there.
        layers: The further layers of each of ``rows``; empty for models without.
        positions: Positions in the model's format.
        segments: Segments for attention.
        last: The indices in the row after which a token is chosen.
    """

    def __init__(
        self, chunks: Sequence[SequenceChunk], embeddings: Mapping[bytes, Embeddings]
    ) -> None:
        self.token_ids: list[int] = []
        self.targets: list[Indices] = []
        self.rows: list[torch.Tensor] = []
        self.layers: list[list[torch.Tensor]] = []
        self.segments: list[Segment] = []
        self.last: list[int] = []
        positions: list[torch.Tensor] = []
        for chunk in chunks:
            self._add(chunk, embeddings)
            positions.append(chunk.sequence.state.positions.between(chunk.start, chunk.end))
        joined = torch.cat(positions, dim=1)
        self.positions = joined[:, None] if len(joined) > 1 else joined

    def _add(self, chunk: SequenceChunk, embeddings: Mapping[bytes, Embeddings]) -> None:
        state, begin = chunk.sequence.state, len(self.token_ids)
        self.token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        for each in state.filling.between(chunk.start, chunk.end):
            targets = each.targets - chunk.start + begin
            for index in targets.tolist():
                self.token_ids[index] = 0
            found = embeddings[each.filled.item.key]
            self.targets.append(targets)
            self.rows.append(found.rows[each.rows])
            if found.layers:
                self.layers.append([layer[each.rows] for layer in found.layers])
        num_tokens = chunk.end - chunk.start
        blocks = _blocks_until(state.blocks, chunk.start, chunk.end)
        self.segments.append(Segment(state.kv_cache, chunk.start, num_tokens, blocks))
        if chunk.samples:
            self.last.append(len(self.token_ids) - 1)


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Join tensors of any device."""
    return torch.cat([part.to(like, non_blocking=True) for part in parts])


def _blocks(items: Sequence[FilledItem]) -> torch.Tensor:
    blocks = torch.full((int(items[-1].targets[-1]) + 1,), -1)
    for number, filled in enumerate(items):
        blocks[torch.from_numpy(filled.targets)] = number
    return blocks


def _blocks_until(blocks: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    """Return the blocks up to ``end``; ``None`` if no position from ``start`` on is in a block."""
    if blocks is None or bool((blocks[start:end] < 0).all()):
        return None
    return torch.nn.functional.pad(blocks[:end], (0, max(0, end - len(blocks))), value=-1)
