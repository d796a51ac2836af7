"""Placement of requests on the servers of an upstream. Pure: the caller gives the time.

A request with a key goes to the server that rendezvous hashing names for the key, so that all
gateways choose the same one, and a server that comes or goes moves only its own keys. The load is
bounded: a server that has its share of the running requests is passed over, and the next one of the
key's order is chosen. A request without a key goes to the least loaded server.

A server gets a weight below 1 for a while after it returns, and 0 while it is ejected: too many of
its latest requests failed.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

_SPARE: Final = 1.5
"""Share of a server in the running requests, as a multiple of its fair share."""
_LEAST_SHARE: Final = 8
"""Running requests that a server may have in any case: affinity matters more than so few."""
_HALF_LIFE_S: Final = 10.0
_LEAST_FAILURES: Final = 2.7
"""A little less than three, since failures count less with time."""
_FAILING_PART: Final = 0.5
_EJECTED_S, _MOST_EJECTED_S = 5.0, 60.0
"""Time of the first ejection, which doubles with each further one; its maximum."""
_RETURN_S: Final = 30.0
"""Time in which the weight of a server grows to 1 after its return."""
_LEAST_WEIGHT: Final = 0.1
_MOST_RETRIES: Final = 20.0
"""Retries that are possible at once."""
_RETRIES_A_REQUEST: Final = 0.2
_BLOCK_NBYTES: Final = 512
_MAX_BLOCKS: Final = 128
"""Blocks of a text that count: its first 64 KiB."""
_KNOWN_PART: Final = 0.5
"""Part of a text that a known prefix must cover: a shorter one is the instructions of all texts."""


@dataclass(slots=True, eq=False)
class Replica:
    """Server of an upstream.

    Invariants:
        - ``num_running`` is the number of requests and WebSockets that are open on it.
        - ``num_failed`` is at most ``num_ended``; both decay by half in `_HALF_LIFE_S`.
    """

    name: str
    is_ready: bool = False
    """Whether it answers its health check."""
    is_late: bool = False
    """Whether it was ready before, or is new beside others: it gets its load slowly."""
    num_running: int = 0
    num_failed: float = 0.0
    num_ended: float = 0.0
    counted_s: float = 0.0
    num_ejections: int = 0
    ejected_until_s: float = -math.inf
    returned_s: float = -math.inf

    def weight(self, now_s: float) -> float:
        """Return its share of the load, as a part of that of a server in full use; 0: none."""
        if not self.is_ready or now_s < self.ejected_until_s:
            return 0.0
        since_s = now_s - max(self.returned_s, self.ejected_until_s)
        return min(max(since_s / _RETURN_S, _LEAST_WEIGHT), 1.0)


class Choice(NamedTuple):
    """Server of a request, and how it was chosen: see `Placement.choose`."""

    replica: Replica
    how: Literal["known", "first", "other", "least_loaded"]


class Placement:
    """The servers of an upstream, and the choice between them."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}

    @property
    def replicas(self) -> Collection[Replica]:
        """All servers, also those that are not ready."""
        return self._replicas.values()

    def add(self, name: str, *, is_late: bool = False) -> Replica:
        """Add a server that is not ready yet; return it.

        Args:
            is_late: Whether it comes later than the first ones.
        """
        self._replicas[name] = Replica(name, is_late=is_late)
        return self._replicas[name]

    def remove(self, replica: Replica) -> None:
        """Remove a server: it gets no more requests."""
        del self._replicas[replica.name]

    def set_ready(self, replica: Replica, *, is_ready: bool, now_s: float) -> None:
        """Note the result of a health check: a late server gets its load slowly from now on."""
        if is_ready and not replica.is_ready:
            if replica.is_late:
                replica.returned_s = now_s
            replica.is_late = True
        replica.is_ready = is_ready

    def note(self, replica: Replica, *, has_failed: bool, now_s: float) -> bool:
        """Note the end of a request; return whether the server is ejected now.

        At most half of the servers in use are ejected: if more fail, the requests are the cause.
        """
        decay = 0.5 ** ((now_s - replica.counted_s) / _HALF_LIFE_S)
        replica.counted_s = now_s
        replica.num_ended = replica.num_ended * decay + 1
        replica.num_failed = replica.num_failed * decay + has_failed
        if not has_failed or replica.weight(now_s) == 0:
            return False
        if replica.num_failed < _LEAST_FAILURES:
            return False
        if replica.num_failed < _FAILING_PART * replica.num_ended:
            return False
        ready = [each for each in self.replicas if each.is_ready]
        num_ejected = sum(now_s < each.ejected_until_s for each in ready)
        if 2 * (num_ejected + 1) > len(ready):
            return False
        if now_s - replica.ejected_until_s > _MOST_EJECTED_S:
            replica.num_ejections = 0
        spell_s = min(_EJECTED_S * 2**replica.num_ejections, _MOST_EJECTED_S)
        replica.num_ejections += 1
        replica.ejected_until_s = now_s + spell_s
        replica.num_failed = replica.num_ended = 0.0
        return True

    def choose(
        self,
        key: bytes,
        *,
        now_s: float,
        preferred: Collection[str] = (),
        excluded: Collection[Replica] = (),
    ) -> Choice | None:
        """Choose the server of a request; ``None`` if there is none. Changes nothing.

        Args:
            key: Requests with the same key share results; empty for none.
            now_s: Monotonic seconds.
            preferred: Names of the servers that come first, in the key's order.
            excluded: Servers that failed for this request.
        """
        weights = {
            each: weight
            for each in self.replicas
            if each not in excluded and (weight := each.weight(now_s)) > 0
        }
        if not weights:  # an ejected server is better than none
            waiting = (each for each in self.replicas if each.is_ready and each not in excluded)
            weights = dict.fromkeys(waiting, _LEAST_WEIGHT)
        if not weights:
            return None
        least = min(weights, key=lambda each: ((each.num_running + 1) / weights[each], each.name))
        if not key:
            return Choice(least, "least_loaded")
        total = sum(each.num_running for each in weights) + 1
        all_weights = sum(weights.values())
        in_order = sorted(
            weights, key=lambda each: (each.name in preferred, rank(key, each.name)), reverse=True
        )
        for each in in_order:
            share = _SPARE * total * weights[each] / all_weights
            if each.num_running < math.ceil(max(share, _LEAST_SHARE * weights[each])):
                if each.name in preferred:
                    return Choice(each, "known")
                return Choice(each, "first" if each is in_order[0] else "other")
        return Choice(least, "other")


@dataclass(slots=True)
class RetryBudget:
    """Limit on retries, so that servers with too much load do not get each request several times.

    Invariants: ``left`` is between 0 and `_MOST_RETRIES`.
    """

    left: float = _MOST_RETRIES

    @property
    def has_any(self) -> bool:
        """Whether a request may be sent to another server now."""
        return self.left >= 1

    def earn(self) -> None:
        """Note a request of a client."""
        self.left = min(self.left + _RETRIES_A_REQUEST, _MOST_RETRIES)

    def spend(self) -> None:
        """Note a retry of a request that began while it was allowed.

        Requests that one server fails together are all sent again: the budget is 0 after that.
        """
        self.left = max(0.0, self.left - 1)


def rank(key: bytes, name: str) -> bytes:
    """Return the rank of a server for a key, by rendezvous hashing: the highest one comes first."""
    return hashlib.blake2b(key + name.encode(), digest_size=8).digest()


@dataclass(slots=True)
class Prefixes:
    """Servers that have seen the beginning of a text, by the digests of its blocks.

    Invariants: It has at most ``max_blocks`` entries, those that were used last.
    """

    max_blocks: int = 1 << 16
    _names: OrderedDict[bytes, str] = field(default_factory=OrderedDict)

    def find(self, blocks: Sequence[bytes]) -> str:
        """Return the server that has seen the longest prefix; empty if it is less than half of the
        text, or unknown.
        """
        least = math.ceil(len(blocks) * _KNOWN_PART)
        for index in range(len(blocks) - 1, max(least, 1) - 2, -1):
            if name := self._names.get(blocks[index], ""):
                return name
        return ""

    def note(self, blocks: Sequence[bytes], name: str) -> None:
        """Note that a server gets a text."""
        for block in blocks:
            self._names[block] = name
            self._names.move_to_end(block)
        while len(self._names) > self.max_blocks:
            self._names.popitem(last=False)


def blocks_of(text: bytes) -> list[bytes]:
    """Return the digests of a text's prefixes, each a block longer; without an incomplete block."""
    hasher, digests = hashlib.blake2b(digest_size=16), []
    for start in range(
        0, min(len(text) // _BLOCK_NBYTES, _MAX_BLOCKS) * _BLOCK_NBYTES, _BLOCK_NBYTES
    ):
        hasher.update(text[start : start + _BLOCK_NBYTES])
        digests.append(hasher.digest())
    return digests
