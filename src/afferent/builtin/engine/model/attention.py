"""Attention over a packed row of the tokens of many sequences, one behind the other.

`transformers` computes everything else of a packed row as for one long sequence; attention
processes each sequence alone, over a KV cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from afferent.errors import UnsupportedModel

IMPLEMENTATION: Final = "afferent_packed"
GROWTH: Final = 2
"""Growth factor of a sequence's KV cache: its capacity is at most this multiple of its length."""
_LEAST_CAPACITY = 64


class SequenceKvCache:
    """Keys and values of one sequence, layer by layer."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, _LEAST_CAPACITY)
        self._layers: dict[tuple[int, str], torch.Tensor] = {}

    def begin_with(self, other: SequenceKvCache, num_tokens: int, *, is_move: bool) -> None:
        """Take the first positions of another sequence, which ends if they are moved."""
        if is_move:
            self._layers = other._layers
            return
        for place, held in other._layers.items():
            heads, _, head_dim = held.shape
            copied = held.new_empty((heads, max(self._capacity, num_tokens), head_dim))
            copied[:, :num_tokens] = held[:, :num_tokens]
            self._layers[place] = copied

    def put(self, layer: int, kind: str, start: int, new: torch.Tensor) -> torch.Tensor:
        """Store ``(heads, num_tokens, head_dim)`` as the positions from ``start`` on.

        Args:
            layer: The layer's index.
            kind: ``keys`` or ``values``.

        Returns:
            All positions up to the last new one: a view.
        """
        heads, num_tokens, head_dim = new.shape
        end = start + num_tokens
        held = self._layers.get((layer, kind))
        if held is None or held.shape[1] < end:
            while self._capacity < end:  # so that copies stay rare
                self._capacity *= GROWTH
            larger = new.new_empty((heads, self._capacity, head_dim))
            if held is not None:
                larger[:, :start] = held[:, :start]
            held = self._layers[layer, kind] = larger
        held[:, start:end] = new
        return held[:, :end]


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of one sequence in a packed row.

    Attributes:
        kv_cache: The sequence's KV cache.
        start: The position of its first token here.
        num_tokens: Number of its tokens here.
        blocks: For each position up to the last one here, the number of the block whose positions
            attend to each other, -1 for none; ``None`` if there are no blocks at all.
    """

    kv_cache: SequenceKvCache
    start: int
    num_tokens: int
    blocks: torch.Tensor | None = None


class Packing:
    """Segments of a row, in order, and the masks that are common to layers of a kind."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Return ``(num_tokens, heads, head_dim)`` from tensors of ``(heads, num_tokens,
        head_dim)``.
        """
        heads, num_tokens, _ = query.shape
        out = query.new_empty((num_tokens, heads, values.shape[-1]))
        begin = 0
        for number, segment in enumerate(self._segments):
            here = slice(begin, begin + segment.num_tokens)
            begin = here.stop
            kv_cache, start = segment.kv_cache, segment.start
            all_keys = kv_cache.put(layer, "keys", start, keys[:, here])
            all_values = kv_cache.put(layer, "values", start, values[:, here])
            first = 0 if window is None else max(0, start + 1 - window)
            mask = self._mask(number, window, query.device)
            attended = scaled_dot_product_attention(
                query[None, :, here],
                all_keys[None, :, first:],
                all_values[None, :, first:],
                attn_mask=mask,
                is_causal=mask is None and segment.num_tokens > 1,
                scale=scale,
                enable_gqa=heads != keys.shape[0],
            )
            out[here] = attended[0].transpose(0, 1)
        return out

    def _mask(self, number: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        if (number, window) not in self._masks:
            mask = _mask(self._segments[number], window)
            self._masks[number, window] = None if mask is None else mask.to(device)
        return self._masks[number, window]


def _mask(segment: Segment, window: int | None) -> torch.Tensor | None:
    """Return a boolean matrix of the keys that each token attends to.

    ``None`` where attention needs no matrix: a single token attends to all its keys, and a first
    chunk is causal.
    """
    start, end = segment.start, segment.start + segment.num_tokens
    if segment.num_tokens == 1:
        return None
    if start == 0 and segment.blocks is None and (window is None or end <= window):
        return None
    first = 0 if window is None else max(0, start + 1 - window)
    queries, keys = torch.arange(start, end)[:, None], torch.arange(first, end)
    allowed = keys <= queries
    if segment.blocks is not None:
        of_keys, of_queries = segment.blocks[first:end], segment.blocks[start:end, None]
        allowed |= (of_keys == of_queries) & (of_queries >= 0)
    if window is not None:
        allowed &= keys > queries - window
    return allowed


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the signature of `transformers`: tensors of ``(1, heads, num_tokens,
    head_dim)``.
    """
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise UnsupportedModel("the model's attention is of a kind that is not done here")
    layer, window = module.layer_idx, sliding_window
    out = packing.attend(layer, query[0], key[0], value[0], scale=scaling, window=window)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
