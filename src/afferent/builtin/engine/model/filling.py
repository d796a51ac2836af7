"""Mapping from the embeddings of items to positions of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afferent.builtin.engine.model.embeddings import PlacedItem
from afferent.errors import InternalError
from afferent.media.families.family import Family
from afferent.schedule.window import WindowIndex

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class FilledItem:
    """Item with ``targets``: the positions of its placeholder that hold the model's token for
    embeddings, in order. Some models have text between them.
    """

    item: PlacedItem
    targets: Indices


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an item's embeddings, and the positions that they go to."""

    filled: FilledItem
    rows: slice
    targets: Indices


class Filling:
    """Items of a sequence, or of its last input, by position."""

    def __init__(
        self,
        family: Family,
        token_ids: Sequence[int],
        items: Sequence[PlacedItem],
        *,
        base: int = 0,
    ) -> None:
        """Find the positions of all items.

        Args:
            base: Position of the first of ``token_ids``, from which placeholders count.

        Raises:
            InvalidPlaceholders: Items overlap, or are not in prompt order.
            InternalError: An item lies outside of the prompt, or has no position for embeddings.
        """
        self.items = [_filled(family, token_ids, item, base) for item in items]
        placed = ((each.item.placeholder, each) for each in self.items)
        self._index: WindowIndex[FilledItem] = WindowIndex()
        self._index.extend(placed, base=base)

    def between(self, start: int, end: int) -> Iterator[Rows]:
        """Yield the rows for the positions ``[start, end)``, in order."""
        for ordinal in self._index.in_window(start, end):
            filled = self._index[ordinal]
            first, last = np.searchsorted(filled.targets, (start, end)).tolist()
            if first < last:
                yield Rows(filled, slice(first, last), filled.targets[first:last])


def _filled(family: Family, token_ids: Sequence[int], item: PlacedItem, base: int) -> FilledItem:
    start, length = item.placeholder.offset, item.placeholder.length
    if start + length > len(token_ids):
        raise InternalError("an item's placeholder lies outside of the prompt")
    embed = family.tokens[item.modality].embed
    ids: NDArray[Any] = np.array(token_ids[start : start + length])
    targets = base + start + np.flatnonzero(ids == embed)
    if not len(targets):
        raise InternalError("an item's placeholder has no place for embeddings")
    return FilledItem(item, targets)
