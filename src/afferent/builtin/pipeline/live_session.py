"""State of a live session: its settings, and its items in order. Pure.

A session is a log of `Change`: the same changes give the same state, so another frontend can
continue it. Items name their media by digests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Literal

from msgspec import Struct

from afferent.builtin.pipeline.stored_turns import Turn

RETENTION_RATIO: Final = 0.8
"""Part of a limit that stays after a truncation, unless the client sets another one.

Each truncation changes the beginning of the prompt, which is then computed again: so it removes
several items at once.
"""


class Window(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Limits that a session's items stay within; ``None``: no limit."""

    seconds: float | None = None
    items: int | None = None
    tokens: int | None = None


class Settings(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Settings of a session.

    Attributes:
        may_truncate: Whether old items are removed if the model's context is full.
        retention_ratio: Part of a limit that stays after a truncation; ``None``:
            `RETENTION_RATIO`.
        most_tokens: Limit of the items' tokens, if it is less than the model's.
    """

    instructions: str = ""
    max_output_tokens: int | None = None
    temperature: float | None = None
    may_truncate: bool = True
    retention_ratio: float | None = None
    most_tokens: int | None = None
    window: Window = Window()


class LiveItem(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Item of a session.

    Attributes:
        arrived_s: Unix time of its arrival.
        num_tokens: Length in the prompt.
    """

    id: str
    turn: Turn
    arrived_s: float
    num_tokens: int
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


class Added(Struct, frozen=True, array_like=True, tag="add", forbid_unknown_fields=True):
    """An item is added: behind another one, or at the end.

    An item whose predecessor has been removed since is the first one.
    """

    item: LiveItem
    after: str | None = None


class Removed(Struct, frozen=True, array_like=True, tag="remove", forbid_unknown_fields=True):
    ids: list[str]


class Configured(Struct, frozen=True, array_like=True, tag="set", forbid_unknown_fields=True):
    settings: Settings


class Continued(Struct, frozen=True, array_like=True, tag="continue", forbid_unknown_fields=True):
    """Another connection continues the session: the one before it is fenced off."""


Change = Added | Removed | Configured | Continued

FIRST: Final = "root"
"""Predecessor of the first item, as in OpenAI's API."""


class LiveSession:
    """Settings and items of a session.

    Invariants:
        - ``num_tokens`` is the sum of the items' tokens.
        - An answer that is being written is an item in progress, and no part of the log.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.num_tokens = 0
        self._items: dict[str, LiveItem] = {}

    # Questions

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._items

    def __iter__(self) -> Iterator[LiveItem]:
        return iter(self._items.values())

    def newest(self) -> Iterator[LiveItem]:
        """Yield the items from the last one on, backwards."""
        return reversed(self._items.values())

    def get(self, item_id: str) -> LiveItem | None:
        return self._items.get(item_id)

    @property
    def last_id(self) -> str | None:
        return next(reversed(self._items), None)

    def before(self, item_id: str) -> str | None:
        """Return the id of the item before this one; O(1) for the last one."""
        backwards = reversed(self._items)
        for each in backwards:
            if each == item_id:
                return next(backwards, None)
        return None

    def overdue(self, now_s: float, *, most_tokens: int) -> list[str]:
        """Return the ids of the items to remove, from the first one on.

        Items are removed if a limit is exceeded, until they are within `RETENTION_RATIO` of it.
        O(removed items).

        Args:
            now_s: Unix time.
            most_tokens: Limit of the model for all items.
        """
        settings, window = self.settings, self.settings.window
        ratio = RETENTION_RATIO if settings.retention_ratio is None else settings.retention_ratio
        given = [window.tokens]
        if settings.may_truncate:
            given += [settings.most_tokens, most_tokens]
        tokens = min((each for each in given if each is not None), default=None)
        kept_tokens, kept_items, since_s = self.num_tokens, len(self._items), 0.0
        if tokens is not None and self.num_tokens > tokens:
            kept_tokens = int(ratio * tokens)
        if window.items is not None and len(self._items) > window.items:
            kept_items = max(1, int(ratio * window.items))
        if window.seconds is not None and self._first_arrived_s < now_s - window.seconds:
            since_s = now_s - ratio * window.seconds
        left_tokens, left_items, found = self.num_tokens, len(self._items), []
        for item in self._items.values():
            if (
                left_tokens <= kept_tokens
                and left_items <= kept_items
                and (item.arrived_s >= since_s)
            ):
                break
            if item.status == "in_progress":  # the answer to the items before it
                break
            found.append(item.id)
            left_tokens -= item.num_tokens
            left_items -= 1
        return found

    # Changes

    def apply(self, change: Change) -> None:
        """Apply a change; unknown ids are ignored."""
        match change:
            case Added(item, after):
                self._add(item, after)
            case Removed(ids):
                for item_id in ids:
                    removed = self._items.pop(item_id, None)
                    self.num_tokens -= removed.num_tokens if removed is not None else 0
            case Configured(settings):
                self.settings = settings
            case Continued():
                pass

    def begin_answer(self, item: LiveItem) -> None:
        """Add an answer that is being written; `Added` replaces it."""
        self._add(item, None)

    def drop_answer(self, item_id: str) -> None:
        """Remove an answer that was not written."""
        self.apply(Removed([item_id]))

    def _add(self, item: LiveItem, after: str | None) -> None:
        begun = self._items.get(item.id)
        self.num_tokens += item.num_tokens - (0 if begun is None else begun.num_tokens)
        if begun is not None or after is None or after == self.last_id:
            self._items[item.id] = item  # in its place, or at the end
            return
        at = 0
        if after in self._items:
            at = 1 + next(n for n, each in enumerate(self._items) if each == after)
        items = list(self._items.values())
        self._items = {each.id: each for each in (*items[:at], item, *islice(items, at, None))}

    @property
    def _first_arrived_s(self) -> float:
        first = next(iter(self._items.values()), None)
        return float("inf") if first is None else first.arrived_s
