"""A decoder that computes all sequences of a step in one pass: one row, packed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from afferent.engine.attention import IMPLEMENTATION, KvMemory, Packing, Segment
from afferent.engine.embeddings import Embeddings, PlacedItem, UnusableEmbeddings
from afferent.engine.filling import FilledItem, Filling, Indices
from afferent.engine.parts import Part
from afferent.engine.positions import Positions, positions_of
from afferent.errors import UnsupportedModel
from afferent.preprocess.family import Family

_SELF_ATTENDING = frozenset({"gemma3"})
"""Models in which the positions of an item attend to each other, later ones included."""
_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Others keep something else than keys and values, or look at them otherwise."""
_ROOM_FOR_ANSWER = 64


@dataclass(frozen=True, slots=True)
class _State:
    """Of a sequence. ``blocks`` as in `Segment`, up to the end of the last item."""

    filling: Filling
    positions: Positions
    memory: KvMemory
    blocks: torch.Tensor | None


class PackedDecoder:
    """The language model of a decoder-only model."""

    def __init__(self, model: Any, family: Family) -> None:
        """
        Raises:
            UnsupportedModel: Its answers would be wrong here.
        """
        config, text = model.config, model.config.get_text_config()
        if getattr(text, "final_logit_softcapping", None) or getattr(text, "logit_scale", None):
            raise UnsupportedModel(f"the logits of {config.model_type} are not done here")
        self.cuts_items = config.model_type not in _SELF_ATTENDING
        if self.cuts_items and "token_type_ids" in inspect.signature(model.forward).parameters:
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
            memory=KvMemory(len(token_ids) + _ROOM_FOR_ANSWER),
            blocks=_blocks(filling.items) if items and not self.cuts_items else None,
        )

    def check(self, part: Part, embeddings: Mapping[bytes, Embeddings]) -> None:
        """See `Decoder.check`."""
        for each in part.sequence.state.filling.between(part.start, part.end):
            found = embeddings.get(each.filled.item.key)
            layers = (found.rows, *found.layers) if found else ()
            wanted = [len(each.filled.targets)] * self.num_embed_layers
            if list(map(len, layers)) != wanted:
                raise UnusableEmbeddings(part.sequence.sequence_id)

    def logits(self, parts: Sequence[Part], embeddings: Mapping[bytes, Embeddings]) -> torch.Tensor:
        """See `Decoder.logits`."""
        row = _Row(parts, embeddings)
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
    """The parts of a step behind each other.

    Attributes:
        token_ids: 0 where embeddings go: not every model has a row for its own media tokens.
        targets: The indices in the row that embeddings go to, in order.
        rows: The embeddings that go there.
        layers: For each of ``rows`` those of the further layers; empty for models without.
        positions: As the model takes them.
        segments: For attention.
        last: The indices in the row that a token is chosen after.
    """

    def __init__(self, parts: Sequence[Part], embeddings: Mapping[bytes, Embeddings]) -> None:
        self.token_ids: list[int] = []
        self.targets: list[Indices] = []
        self.rows: list[torch.Tensor] = []
        self.layers: list[list[torch.Tensor]] = []
        self.segments: list[Segment] = []
        self.last: list[int] = []
        positions: list[torch.Tensor] = []
        for part in parts:
            self._add(part, embeddings)
            positions.append(part.sequence.state.positions.between(part.start, part.end))
        joined = torch.cat(positions, dim=1)
        self.positions = joined[:, None] if len(joined) > 1 else joined

    def _add(self, part: Part, embeddings: Mapping[bytes, Embeddings]) -> None:
        state, begin = part.sequence.state, len(self.token_ids)
        self.token_ids += part.sequence.token_ids[part.start : part.end]
        for each in state.filling.between(part.start, part.end):
            targets = each.targets - part.start + begin
            for index in targets.tolist():
                self.token_ids[index] = 0
            found = embeddings[each.filled.item.key]
            self.targets.append(targets)
            self.rows.append(found.rows[each.rows])
            if found.layers:
                self.layers.append([layer[each.rows] for layer in found.layers])
        num_tokens = part.end - part.start
        blocks = _blocks_until(state.blocks, part.start, part.end)
        self.segments.append(Segment(state.memory, part.start, num_tokens, blocks))
        if part.samples:
            self.last.append(len(self.token_ids) - 1)


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """From wherever each of them is."""
    return torch.cat([part.to(like, non_blocking=True) for part in parts])


def _blocks(items: Sequence[FilledItem]) -> torch.Tensor:
    blocks = torch.full((int(items[-1].targets[-1]) + 1,), -1)
    for number, filled in enumerate(items):
        blocks[torch.from_numpy(filled.targets)] = number
    return blocks


def _blocks_until(blocks: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    """For the positions up to ``end``; ``None`` if none from ``start`` on is in a block."""
    if blocks is None or bool((blocks[start:end] < 0).all()):
        return None
    return torch.nn.functional.pad(blocks[:end], (0, max(0, end - len(blocks))), value=-1)
