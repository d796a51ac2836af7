"""Sequences that have ended, whose KV caches wait for prompts that begin alike.

The blocks of a kept sequence count as free: the scheduler drops kept sequences, the least recently
used first, as soon as running ones need their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from afferent.schedule.sequence import Sequence
from afferent.schedule.step import Reuse

Tokens = NDArray[np.int64]

MOST = 64
"""Most kept sequences: each new one is compared with all of its tenant."""
LEAST_TOKENS = 16
"""Shorter beginnings are computed again: many unrelated prompts share so many tokens."""
_FirstItem = tuple[float, bytes | None]
"""Position and key of the first item; infinity without items."""


class KeptSequences:
    """Kept sequences, in the order of their last use; those of tenants are apart."""

    def __init__(self, *, least_tokens: int = LEAST_TOKENS) -> None:
        """Keep no sequence yet."""
        self._least_tokens = least_tokens
        self._kept: dict[str, Sequence] = {}
        self._firsts: dict[str, _FirstItem] = {}
        self.num_blocks = 0
        """Blocks of the KV cache that they take."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sequence: Sequence) -> list[Sequence]:
        """Keep a sequence that has ended; return those that are kept no more: it begins with them.

        Args:
            sequence: All its tokens are in ``tokens``; it has its blocks still.
        """
        contained, first = [], _first_item(sequence)
        for kept in self._of_tenant(sequence):
            length = kept.num_computed
            is_beginning = (
                length <= sequence.num_computed
                and length <= _most_common(first, self._firsts[kept.id])
                and _num_common(kept.tokens[:length], sequence.tokens) == length
                and _until_items_differ(kept, sequence, length) == length
            )
            if is_beginning:
                contained.append(kept)
        for kept in contained:
            self._remove(kept)
        self._kept[sequence.id], self._firsts[sequence.id] = sequence, first
        self.num_blocks += sequence.num_blocks
        return contained

    def reuse(self, sequence: Sequence, *, splits_items: bool) -> tuple[Reuse, Sequence] | None:
        """Return the longest common beginning of a new sequence and a kept one, and the kept one.

        A kept sequence that the new one continues is kept no more. O(tokens of all kept sequences
        of the tenant), and O(items) of the sequences that are compared further.

        Args:
            splits_items: Whether the beginning may end inside an item.
        """
        tokens, best, first = sequence.tokens, None, _first_item(sequence)
        most = len(tokens) - 1  # the last one is computed: the next token is chosen after it
        found = sorted(
            (
                (_num_common(tokens[:most], kept.tokens[: kept.num_computed]), kept)
                for kept in self._of_tenant(sequence)
                if _most_common(first, self._firsts[kept.id]) >= self._least_tokens
            ),
            key=lambda each: each[0],
            reverse=True,
        )
        length = self._least_tokens - 1
        for num_tokens, kept in found:
            if num_tokens <= length:
                break
            num_tokens = _until_items_differ(sequence, kept, num_tokens)
            if not splits_items:
                num_tokens = sequence.index.whole_before(0, num_tokens)
            if num_tokens > length:
                length, best = num_tokens, kept
        if best is None:
            return None
        is_move = length == best.num_computed
        if is_move:
            self._remove(best)
        else:
            self._kept[best.id] = self._kept.pop(best.id)  # the most recently used
        return Reuse(sequence.id, best.id, length, is_move), best

    def remove(self, sequence_id: str) -> Sequence | None:
        """Remove a sequence, if it is kept, and return it."""
        kept = self._kept.get(sequence_id)
        if kept is not None:
            self._remove(kept)
        return kept

    def shrink(self, num_blocks: int) -> Iterator[Sequence]:
        """Drop sequences until the rest takes at most ``num_blocks``; yield them."""
        while self._kept and (self.num_blocks > num_blocks or len(self._kept) > MOST):
            oldest = next(iter(self._kept.values()))
            self._remove(oldest)
            yield oldest

    def clear(self) -> list[Sequence]:
        """Remove all sequences, and return them."""
        removed = list(self._kept.values())
        self._kept.clear()
        self._firsts.clear()
        self.num_blocks = 0
        return removed

    def _of_tenant(self, sequence: Sequence) -> Iterator[Sequence]:
        tenant = sequence.share.tenant
        return (kept for kept in self._kept.values() if kept.share.tenant == tenant)

    def _remove(self, kept: Sequence) -> None:
        del self._kept[kept.id], self._firsts[kept.id]
        self.num_blocks -= kept.num_blocks


def _first_item(sequence: Sequence) -> _FirstItem:
    if not sequence.index.num_seen:
        return math.inf, None
    return sequence.index.span(0)[0], sequence.index[0].key


def _most_common(one: _FirstItem, other: _FirstItem) -> float:
    """Return where two beginnings differ at the latest; it costs less than a comparison."""
    return math.inf if one == other else min(one[0], other[0])


def _num_common(one: Tokens, other: Tokens) -> int:
    """Return the number of tokens before the first difference."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def _until_items_differ(one: Sequence, other: Sequence, num_tokens: int) -> int:
    """Return the position of the first item that is not in both, at most ``num_tokens``."""
    num_items = 0
    for sequence in (one, other):
        num_items = max(num_items, sequence.index.in_window(0, num_tokens).stop)
    for ordinal in range(num_items):
        spans = [
            each.index.span(ordinal) if ordinal < each.index.num_seen else None
            for each in (one, other)
        ]
        if spans[0] != spans[1] or one.index[ordinal].key != other.index[ordinal].key:
            return min([num_tokens, *(span[0] for span in spans if span is not None)])
    return num_tokens
