"""Which items does a window of positions touch? Two bisections, however many items there are.

Items have *ordinals*: 0 for the first item of the request, counted on for as long as it lives.
An ordinal keeps its meaning when the items before it are dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

from afferent.errors import InvalidPlaceholders
from afferent.types import Placeholder

T = TypeVar("T")

# Dropped items are cut off the lists once there are so many of them, and no fewer than are left.
_MIN_CUT = 64


class WindowIndex(Generic[T]):
    """The items of one request by position, for models that take embeddings in their prompt.

    Offsets and ends are plain lists of integers: `bisect` compares those several times faster than
    objects behind a key function.

    Examples:
        >>> from afferent import Placeholder
        >>> from afferent.schedule import WindowIndex
        >>> index = WindowIndex([(Placeholder(2, 4), "cat"), (Placeholder(10, 4), "dog")])
        >>> [index[ordinal] for ordinal in index.in_window(0, 8)]
        ['cat']
    """

    __slots__ = ("_ends", "_head", "_items", "_num_cut", "_offsets", "_position")

    takes_positions: ClassVar[bool] = True
    """Whether items stand in the sequence, and not beside it."""

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
        """How many items there are that are not dropped."""
        return len(self._offsets) - self._head

    def __getitem__(self, ordinal: int) -> T:
        """The item that was given under this ordinal.

        Raises:
            IndexError: It is dropped, or was never there.
        """
        return self._items[self._at(ordinal)]

    @property
    def num_seen(self) -> int:
        """How many items there ever were: the ordinal of the next one."""
        return self._num_cut + len(self._offsets)

    @property
    def end(self) -> int:
        """The position after the last item, dropped or not; 0 without items."""
        return self._position

    def span(self, ordinal: int) -> tuple[int, int]:
        """The positions ``[offset, end)`` of an item; raises as ``index[ordinal]`` does."""
        at = self._at(ordinal)
        return self._offsets[at], self._ends[at]

    def in_window(self, start: int, end: int, lookahead: int = 0) -> range:
        """Ordinals of the items with a position in ``[start, end + lookahead)``.

        An item that ends at ``start`` is out, and so is one that begins at ``end + lookahead``.
        """
        stop = end + lookahead
        if stop <= start:
            return range(0)
        first = bisect_right(self._ends, start, self._head)
        # Each item has a position of its own, so no more items than positions: a short search.
        most = first + stop - start
        offsets = self._offsets
        last = bisect_left(offsets, stop, first, most if most < len(offsets) else len(offsets))
        return range(self._num_cut + first, self._num_cut + last)

    def num_consumed(self, position: int) -> int:
        """How many items lie wholly before ``position``: the ordinal of the first that does not."""
        return self._num_cut + bisect_right(self._ends, position, self._head)

    def whole_before(self, start: int, end: int) -> int:
        """The last position up to ``end`` at which a window from ``start`` cuts no item in two.

        It is ``start`` if the window holds only a part of an item.
        """
        for ordinal in self.in_window(end - 1, end) if end > start else ():
            offset, stop = self.span(ordinal)
            if stop > end:
                return max(start, offset)
        return end

    def whole_after(self, start: int) -> int:
        """The first position after ``start`` at which a window from it cuts no item in two."""
        for ordinal in self.in_window(start, start + 1):
            return self.span(ordinal)[1]
        return start + 1

    @staticmethod
    def needed_at_once(sizes: Iterable[int]) -> int:
        """The most that the items of these sizes occupy for one position to be computed."""
        return max(sizes, default=0)

    # Changes

    def extend(self, placed: Iterable[tuple[Placeholder, T]], *, base: int = 0) -> None:
        """Append items, all or none.

        Args:
            placed: Placeholders and items, in prompt order, after all there are.
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
        """Forget the items wholly before ``position``; no later item may begin before it.

        Amortised over the items: each is moved a constant number of times at most.
        """
        self._head = self.num_consumed(position) - self._num_cut
        self._position = max(self._position, position)
        if self._head >= max(_MIN_CUT, len(self)):
            del self._offsets[: self._head], self._ends[: self._head], self._items[: self._head]
            self._num_cut += self._head
            self._head = 0

    def shed(self, limit: int) -> int:
        """Destroy up to ``limit`` items from the end; how many. For an index nobody asks again."""
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
        """What is wrong with the ``number``-th new item, after one that ends at ``position``."""
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
    """The items of a request to an encoder-decoder model: all at offset 0, beside the prompt.

    The decoder's first position attends to all of them; what later positions need of them is in
    the decoder's own cache by then. So a window touches all items if it begins at 0, and else none.
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
        """Items take no positions of the decoder."""
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
