"""What URLs led to a moment ago, and which are being fetched: of one process's event loop.

A conversation shows its images again with each turn, by the same URLs. What one led to is known for
as long as its host allows (`fresh_s`), so that it need not be fetched again while its features are
there; and what is being fetched by one request is not fetched by another at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from afferent import keys
from afferent.types import Modality

_TAG = b"afferent/url/v1"
_MAX_KNOWN = 16_384
_MAX_FRESH_S = 3600.0
_NOT_TO_BE_KEPT = frozenset({"no-store", "no-cache", "private"})


class UrlMemory:
    """By tenant: what one has been told, another has to fetch."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()  # digest, until when
        self._flights: dict[bytes, asyncio.Event] = {}

    @staticmethod
    def key(url: str, *, tenant: str, modality: Modality) -> bytes:
        return keys.frame(_TAG, tenant.encode(), modality.encode(), url.encode())

    def digest(self, key: bytes) -> bytes | None:
        """Of the bytes that it led to; ``None`` if it has to be fetched."""
        digest, until_s = self._known.get(key, (None, 0.0))
        if digest is not None and until_s <= self._clock():
            del self._known[key]
            return None
        return digest

    def remember(self, key: bytes, digest: bytes, *, fresh_s: float) -> None:
        if fresh_s <= 0:
            return
        self._known[key] = (digest, self._clock() + min(fresh_s, _MAX_FRESH_S))
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def take_off(self, wanted: Iterable[bytes]) -> tuple[Flights, list[asyncio.Event]]:
        """Of what has to be fetched: that which this request begins with, for all others to wait
        for, and the ends of what others have begun with. Who waits for another came later, so none
        waits for itself.
        """
        own, others = [], []
        for key in dict.fromkeys(wanted):
            if (other := self._flights.get(key)) is not None:
                others.append(other)
            else:
                self._flights[key] = asyncio.Event()
                own.append(key)
        return Flights(self, own), others

    def land(self, landed: Collection[bytes]) -> None:
        for key in landed:
            self._flights.pop(key).set()


class Flights:
    """What a request has begun to fetch, until its features are made, or nothing comes of it."""

    def __init__(self, memory: UrlMemory, own: Collection[bytes]) -> None:
        self._memory, self._own = memory, own

    def end(self) -> None:
        own, self._own = self._own, ()
        self._memory.land(own)


def fresh_s(cache_control: Iterable[bytes], age: Iterable[bytes], *, default_s: float) -> float:
    """For how many seconds an answer may be taken for what its URL leads to.

    Args:
        cache_control: The values of the headers of this name (RFC 9111, 5.2.2).
        age: Likewise: how long a cache on the way has had it.
        default_s: For answers that say nothing of it.
    """
    said: dict[str, str] = {}
    for directive in b",".join(cache_control).decode("latin-1").lower().split(","):
        name, _, value = directive.strip().partition("=")
        said.setdefault(name, value.strip('" '))
    if _NOT_TO_BE_KEPT & said.keys():
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in said:
            return max(0.0, _seconds(said[name]) - max(map(_seconds, _texts(age)), default=0.0))
    return default_s


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("latin-1").strip() for value in values]


def _seconds(text: str) -> float:
    """0 for what is no number: who can't be understood is taken to say the least."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0
