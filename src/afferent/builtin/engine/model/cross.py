"""Decoder that attends to its item's embeddings, which are beside the prompt: Whisper's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from afferent.builtin.engine.model.chunks import SequenceChunk
from afferent.builtin.engine.model.embeddings import Embeddings, PlacedItem
from afferent.errors import InternalError, UnusableEmbeddings


@dataclass(slots=True)
class _State:
    """State of a sequence; ``hears`` is False once the cache has all it needs of the embeddings."""

    item: PlacedItem
    cache: EncoderDecoderCache
    hears: bool = True


class CrossDecoder:
    """Decoder of an encoder-decoder model: computes one sequence after the other."""

    can_split_items = True
    num_embed_layers = 1

    def __init__(self, model: Any) -> None:
        self._model = model
        # The cache counts layers by this name, under which Whisper has those of its encoder.
        self._config = copy.deepcopy(model.config)
        self._config.num_hidden_layers = model.config.decoder_layers
        never = model.generation_config.suppress_tokens or []
        self._never = torch.tensor(never, dtype=torch.int64, device=model.device)
        # transformers 5.24 has renamed it.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def begin(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> _State:
        """See `Decoder.begin`."""
        if len(items) != 1 or items[0].placeholder.offset != 0:
            raise InternalError("the model takes one item, beside its prompt")
        caches = [DynamicCache(config=self._config) for _ in range(2)]
        return _State(items[0], EncoderDecoderCache(*caches))

    def reuse(self, state: _State, source: _State, *, num_tokens: int, is_move: bool) -> None:
        """See `Decoder.reuse`."""
        raise InternalError("positions beside an item are not reused")

    @property
    def can_extend(self) -> bool:
        """See `Decoder.can_extend`."""
        return False

    def extend(self, *_: object) -> None:
        """See `Decoder.extend`."""
        raise InternalError("an encoder-decoder model takes no further input")

    def check(self, chunk: SequenceChunk, embeddings: Mapping[bytes, Embeddings]) -> None:
        """See `Decoder.check`."""
        state = chunk.sequence.state
        found = embeddings.get(state.item.key)
        if state.hears and (found is None or len(found.rows) != state.item.placeholder.length):
            raise UnusableEmbeddings(sequence_id=chunk.sequence.sequence_id)

    def logits(
        self, chunks: Sequence[SequenceChunk], embeddings: Mapping[bytes, Embeddings]
    ) -> torch.Tensor:
        """See `Decoder.logits`."""
        rows = [self._run(chunk, embeddings) for chunk in chunks]
        last = [row for row, chunk in zip(rows, chunks, strict=True) if chunk.samples]
        return torch.cat(last) if last else torch.empty((0, self._config.vocab_size))

    def _run(self, chunk: SequenceChunk, embeddings: Mapping[bytes, Embeddings]) -> torch.Tensor:
        state, device = chunk.sequence.state, self._model.device
        if state.hears:
            heard = embeddings[state.item.key].rows[None].to(device)
        else:
            heard = torch.empty((1, 0, self._config.d_model), device=device)
        ids = chunk.sequence.token_ids[chunk.start : chunk.end]
        out = self._model(
            encoder_outputs=(heard,),
            decoder_input_ids=torch.tensor([ids], device=device),
            decoder_position_ids=torch.arange(chunk.start, chunk.end, device=device)[None],
            use_cache=True,
            **{self._cache_name: state.cache},
        )
        state.hears = False
        logits: torch.Tensor = out.logits[:, -1]
        logits[:, self._never] = -torch.inf
        return logits
