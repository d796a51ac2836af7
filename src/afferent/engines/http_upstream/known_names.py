"""Names of the items that a server has got. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final

MOST: Final = 16_384


class KnownNames:
    """Names that a server has got with their items; of more than 16,384, the latest ones.

    A server may evict an item at any time, so that a name here is a guess.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of the names that are known."""
        return frozenset(name for name in names if name in self._names)

    def note(self, names: Iterable[str]) -> None:
        """Add names of items that the server has accepted."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > MOST:
            self._names.popitem(last=False)

    def forget(self, names: Collection[str]) -> None:
        """Remove names that the server does not know."""
        for name in names:
            self._names.pop(name, None)
