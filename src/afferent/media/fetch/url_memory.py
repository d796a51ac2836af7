"""URL cache: digests of recently fetched URLs, and running fetches, of one process's event loop.

A conversation repeats its images with each turn, by the same URLs. The digest of a URL's bytes is
valid as long as its host allows (`fresh_s`), so that no fetch is needed while its features exist.
Concurrent requests for the same URL share one fetch.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from afferent import keys
from afferent.types import FileKind

_TAG = b"afferent/url/v1"
_MAX_KNOWN = 16_384
_MAX_FRESH_S = 3600.0
_NOT_TO_BE_KEPT = frozenset({"no-store", "no-cache", "private"})


class UrlMemory:
    """URL cache by tenant: each tenant makes its own fetches.

    Invariants:
        - At most ``_MAX_KNOWN`` digests are stored, each for an hour at most.
        - Each key in ``_flights`` belongs to one `Flights`, whose `end` removes it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()  # digest, until when
        self._flights: dict[bytes, asyncio.Event] = {}

    @staticmethod
    def key(url: str, *, tenant: str, modality: FileKind) -> bytes:
        return keys.frame(_TAG, tenant.encode(), modality.encode(), url.encode())

    def digest(self, key: bytes) -> bytes | None:
        """Return the digest of the URL's bytes; ``None`` if it must be fetched."""
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
        """Register the URLs that must be fetched.

        Returns:
            The fetches that this request begins, which others wait for, and the end events of other
            requests' fetches. A request waits only for earlier ones, so there is no cycle.
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
    """Fetches of one request, until its features exist, or the request fails."""

    def __init__(self, memory: UrlMemory, own: Collection[bytes]) -> None:
        self._memory, self._own = memory, own

    def end(self) -> None:
        own, self._own = self._own, ()
        self._memory.land(own)


def fresh_s(cache_control: Iterable[bytes], age: Iterable[bytes], *, default_s: float) -> float:
    """Return the seconds for which an answer is a valid copy of its URL's content: an hour at most.

    Args:
        cache_control: The values of the headers of this name (RFC 9111, 5.2.2).
        age: The values of ``Age``: the time that a cache on the way has had it.
        default_s: For answers without such a header.
    """
    said: dict[str, str] = {}
    for directive in b",".join(cache_control).decode("latin-1").lower().split(","):
        name, _, value = directive.strip().partition("=")
        said.setdefault(name, value.strip('" '))
    if _NOT_TO_BE_KEPT & said.keys():
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in said:
            left_s = _seconds(said[name]) - max(map(_seconds, _texts(age)), default=0.0)
            return min(max(0.0, left_s), _MAX_FRESH_S)
    return min(default_s, _MAX_FRESH_S)


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("latin-1").strip() for value in values]


def _seconds(text: str) -> float:
    """Return the seconds; 0 for a malformed number, which is the safe value."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0
