"""Index of a request's items by position: two bisections per query, for any number of items.

Items have *ordinals*: 0 for the first item of the request, counted up over its whole life. An
ordinal keeps its meaning when the items before it are dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

from afferent.errors import InvalidPlaceholders
from afferent.types import Placeholder

T = TypeVar("T")

# Dropped items are cut off the lists once there are this many, and no fewer than remain.
_MIN_CUT = 64


class WindowIndex(Generic[T]):
    """Items of one request by position, for models that take embeddings in their prompt.

    Offsets and ends are plain lists of integers: `bisect` compares them several times faster than
    objects with a key function.

    Examples:
        >>> from afferent import Placeholder
        >>> from afferent.schedule import WindowIndex
        >>> index = WindowIndex([(Placeholder(2, 4), "cat"), (Placeholder(10, 4), "dog")])
        >>> [index[ordinal] for ordinal in index.in_window(0, 8)]
        ['cat']

    Invariants: items are in prompt order and not empty; they overlap only in `CrossAttentionIndex`.
    """

    __slots__ = ("_ends", "_head", "_items", "_num_cut", "_offsets", "_position")

    takes_positions: ClassVar[bool] = True
    """Whether items occupy positions of the sequence."""

    def __init__(self, placed: Iterable[tuple[Placeholder, T]] = ()) -> None:
        """Index items in prompt order, each with its placeholder.

        Raises:
            InvalidPlaceholders: As `extend` does.
        """
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._items: list[T] = []
        self._head = 0  # list position of the first item that is not dropped
        self._num_cut = 0  # ordinal of the item at list position 0
        self._position = 0  # where the next item may begin
        self.extend(placed)

    # Questions

    def __len__(self) -> int:
        """Return the number of items that are not dropped."""
        return len(self._offsets) - self._head

    def __getitem__(self, ordinal: int) -> T:
        """Return the item with this ordinal.

        Raises:
            IndexError: It is dropped, or never existed.
        """
        return self._items[self._at(ordinal)]

    @property
    def num_seen(self) -> int:
        """Number of items ever added: the ordinal of the next one."""
        return self._num_cut + len(self._offsets)

    @property
    def end(self) -> int:
        """Position after the last item, dropped or not; 0 without items."""
        return self._position

    def span(self, ordinal: int) -> tuple[int, int]:
        """Return the positions ``[offset, end)`` of an item; raises as ``index[ordinal]`` does."""
        at = self._at(ordinal)
        return self._offsets[at], self._ends[at]

    def in_window(self, start: int, end: int, lookahead: int = 0) -> range:
        """Return the ordinals of the items with a position in ``[start, end + lookahead)``.

        An item that ends at ``start`` is not included, nor one that begins at ``end + lookahead``.
        """
        stop = end + lookahead
        if stop <= start:
            return range(0)
        first = bisect_right(self._ends, start, self._head)
        # Each item has a position of its own, so there are at most as many items as positions: the
        # search is short.
        most = first + stop - start
        offsets = self._offsets
        last = bisect_left(offsets, stop, first, most if most < len(offsets) else len(offsets))
        return range(self._num_cut + first, self._num_cut + last)

    def num_consumed(self, position: int) -> int:
        """Return the number of items wholly before ``position``: the ordinal of the next one."""
        return self._num_cut + bisect_right(self._ends, position, self._head)

    def whole_before(self, start: int, end: int) -> int:
        """Return the last position up to ``end`` where a window from ``start`` cuts no item.

        It is ``start`` if the window contains only a part of an item.
        """
        for ordinal in self.in_window(end - 1, end) if end > start else ():
            offset, stop = self.span(ordinal)
            if stop > end:
                return max(start, offset)
        return end

    def whole_after(self, start: int) -> int:
        """Return the first position after ``start`` where a window from it cuts no item."""
        for ordinal in self.in_window(start, start + 1):
            return self.span(ordinal)[1]
        return start + 1

    @staticmethod
    def needed_at_once(sizes: Iterable[int]) -> int:
        """Return the most that items of these sizes occupy while one position is computed."""
        return max(sizes, default=0)

    # Changes

    def extend(self, placed: Iterable[tuple[Placeholder, T]], *, base: int = 0) -> None:
        """Append items, all or none.

        Args:
            placed: Placeholders and items, in prompt order, after all existing ones.
            base: Added to every offset.

        Raises:
            InvalidPlaceholders: One is empty, overlaps the one before it, or comes before it; the
                message names both.
        """
        offsets: list[int] = []
        ends: list[int] = []
        items: list[T] = []
        position = self._position
        for placeholder, item in placed:
            offset = placeholder.offset + base
            end = offset + placeholder.length
            if offset < position or end <= offset:
                raise self._error(len(offsets), offset, end, ends[-1] if ends else position)
            offsets.append(offset)
            ends.append(end)
            items.append(item)
            position = end
        self._offsets += offsets
        self._ends += ends
        self._items += items
        self._position = position

    def drop_consumed(self, position: int) -> None:
        """Drop the items wholly before ``position``; no later item may begin before it.

        Amortised over the items: each is moved at most a constant number of times.
        """
        self._head = self.num_consumed(position) - self._num_cut
        self._position = max(self._position, position)
        if self._head >= max(_MIN_CUT, len(self)):
            del self._offsets[: self._head], self._ends[: self._head], self._items[: self._head]
            self._num_cut += self._head
            self._head = 0

    def shed(self, limit: int) -> int:
        """Destroy up to ``limit`` items from the end; return how many. For an index out of use."""
        before = len(self._items)
        del self._offsets[-limit:], self._ends[-limit:], self._items[-limit:]
        return before - len(self._items)

    # Inner steps

    def _at(self, ordinal: int) -> int:
        at = ordinal - self._num_cut
        if at < self._head:
            raise IndexError(f"item {ordinal} is dropped")
        return at

    def _error(self, number: int, offset: int, end: int, position: int) -> InvalidPlaceholders:
        """Return the error of the ``number``-th new item, after one that ends at ``position``."""
        ordinal = self.num_seen + number
        name = f"item {ordinal} at [{offset}, {end})"
        if end <= offset:
            return InvalidPlaceholders(f"{name} is empty")
        if ordinal == 0:
            return InvalidPlaceholders(f"{name} begins before position {position}")
        return InvalidPlaceholders(
            f"{name} begins before item {ordinal - 1}, or what was computed, ends at {position}"
        )


class CrossAttentionIndex(WindowIndex[T]):
    """Items of a request to an encoder-decoder model: all at offset 0, beside the prompt.

    The decoder's first position attends to all of them. What later positions need of them is in the
    decoder's own cache by then. So a window that begins at 0 touches all items, and any other
    window none.
    """

    __slots__ = ()

    takes_positions = False

    def in_window(self, start: int, end: int, lookahead: int = 0) -> range:
        if start > 0 or end + lookahead <= start:
            return range(0)
        return range(self._num_cut + self._head, self.num_seen)

    def num_consumed(self, position: int) -> int:
        return self.num_seen if position > 0 else self._num_cut + self._head

    def whole_before(self, start: int, end: int) -> int:
        return end

    def whole_after(self, start: int) -> int:
        return start + 1

    @staticmethod
    def needed_at_once(sizes: Iterable[int]) -> int:
        return sum(sizes)

    @property
    def end(self) -> int:
        """Return 0: items take no positions of the decoder."""
        return 0

    def extend(self, placed: Iterable[tuple[Placeholder, T]], *, base: int = 0) -> None:
        """Append items, all or none.

        Raises:
            InvalidPlaceholders: One is empty or not at offset 0, or decoding has begun.
        """
        ends: list[int] = []
        items: list[T] = []
        for placeholder, item in placed:
            name = f"item {self.num_seen + len(items)}"
            if placeholder.length <= 0:
                raise InvalidPlaceholders(f"{name} is empty")
            if placeholder.offset + base or self._position:
                raise InvalidPlaceholders(
                    f"{name} is at {placeholder.offset + base}, at least {self._position} positions"
                    " are decoded; an encoder's items are all at 0, before decoding"
                )
            ends.append(placeholder.length)
            items.append(item)
        self._offsets += [0] * len(ends)
        self._ends += ends
        self._items += items
