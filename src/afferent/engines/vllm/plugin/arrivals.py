"""Record of the references of each request that have come to a process of vLLM. Pure."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Final

from afferent.engines.references import Of

_MAX_REQUESTS: Final = 4096


class Step(Enum):
    """Action of the store for a reference."""

    NOTHING = 0
    """No action: the request existed a moment ago."""
    ASK = 1
    """Check that the request exists."""
    LAST = 2
    """The same as `ASK`, and report that all of the request's references have come."""


class Arrivals:
    """Remembers requests whose references come one by one, the latest 4,096 of them.

    Invariants:
        - `_seen` holds incomplete requests only: a request leaves it with its last reference.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, set[int]] = OrderedDict()

    def note(self, of: Of) -> Step:
        """Record a reference, and return the action of the store for it.

        A reference that comes again, or after the last one, is checked each time.
        """
        seen = self._seen.pop(of.request, set())
        is_new, was_empty = of.index not in seen, not seen
        seen.add(of.index)
        if len(seen) >= of.number:
            return Step.LAST
        self._seen[of.request] = seen
        while len(self._seen) > _MAX_REQUESTS:
            self._seen.popitem(last=False)
        return Step.NOTHING if is_new and not was_empty else Step.ASK
