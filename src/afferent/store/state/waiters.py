"""Requests that wait for objects in production, and the outcomes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from afferent.errors import NotPermitted, StoreError
from afferent.store.protocol.results import Failed, InFlight, Made, Order, Outcome, Owner
from afferent.store.state.object import NewObject
from afferent.types import ClientId, ContentKey, Failure, Lease


class Answer(NamedTuple):
    """Answer to a `Wait` or a `Take` of a client."""

    client: ClientId
    seq: int
    result: list[Outcome] | Order


RELEASED = StoreError("the request was released before this was answered")


@dataclass(slots=True, eq=False)
class _Wait:
    seq: int
    keys: list[ContentKey]
    being_made: set[ContentKey]


@dataclass(slots=True, eq=False)
class _Interest:
    """One request's interest in one key: it has no outcome while the object is being made.

    ``would_make`` is the object to create if the request makes it itself.
    """

    would_make: NewObject | None
    outcome: Outcome | None = None
    waits: list[_Wait] = field(default_factory=list)


class Waiters:
    """Interests of requests in keys; ``answers`` receives the answers to `Wait`.

    An outcome is forgotten once it is reported, so that a long request costs no more than a short
    one.

    Invariants:
        - ``_waiting`` has exactly the interests without an outcome.
        - A call waits until all its keys have an outcome, or one is the caller's to make.
        - A request without interests has no entry.
    """

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers
        self._interests: dict[Lease, dict[ContentKey, _Interest]] = {}
        # The interests without an outcome, in order of arrival.
        self._waiting: dict[ContentKey, dict[Lease, _Interest]] = {}

    def __len__(self) -> int:
        """Return the number of requests with an interest."""
        return len(self._interests)

    def is_awaited(self, key: ContentKey) -> bool:
        return key in self._waiting

    def awaited_alone(self, lease: Lease) -> list[ContentKey]:
        """Return the keys that only this request waits for."""
        interests = self._interests.get(lease, {})
        return [key for key in interests if self._waiting.get(key, {}).keys() == {lease}]

    def leases_of(self, client: ClientId) -> list[Lease]:
        return [lease for lease in self._interests if lease[0] == client]

    def candidates(self, key: ContentKey) -> Iterator[tuple[Lease, NewObject]]:
        """Yield the requests that would make the object themselves, in order of arrival."""
        waiting = list(self._waiting.get(key, {}).items())
        return ((lease, it.would_make) for lease, it in waiting if it.would_make is not None)

    def bystanders(self, key: ContentKey) -> list[Lease]:
        """Return the requests that would not make the object themselves."""
        waiting = self._waiting.get(key, {})
        return [lease for lease, it in waiting.items() if it.would_make is None]

    def untold(self, lease: Lease, key: ContentKey, *, finds: bool) -> Outcome | None:
        """Return the outcome of ``key`` if it is not reported yet, and mark it as reported.

        Args:
            finds: Whether the request only looks for an object: any other outcome than that it
                exists waits until the request can take it.
        """
        if lease not in self._interests or (known := self._interests[lease].get(key)) is None:
            return None
        if finds and not isinstance(known.outcome, Made):
            return None
        if known.outcome is not None and not known.waits:
            self._forget(lease, key)
        return known.outcome

    def join(self, lease: Lease, key: ContentKey, *, would_make: NewObject | None = None) -> None:
        """Register a request's interest in ``key``, which has no outcome yet."""
        interests = self._interests.setdefault(lease, {})
        interest = interests.get(key)
        if interest is None:
            interest = interests[key] = _Interest(would_make)
            self._waiting.setdefault(key, {})[lease] = interest
        elif interest.would_make is None:
            interest.would_make = would_make

    def wait(self, seq: int, lease: Lease, keys: list[ContentKey]) -> None:
        """Answer ``seq`` once all ``keys`` have an outcome, or one is the request's to make.

        Raises:
            NotPermitted: The request has not joined one of them, or it is already reported.
        """
        interests = self._interests.get(lease, {})
        if any(key not in interests for key in keys):
            raise NotPermitted(
                "a request waits for keys that it has acquired and that were not there; one was not"
            )
        found = {key: interests[key] for key in keys}
        wait = _Wait(seq, keys, {key for key, it in found.items() if it.outcome is None})
        for interest in found.values():
            interest.waits.append(wait)
        outcomes = [interest.outcome for interest in found.values()]
        if not wait.being_made or any(isinstance(it, Owner) for it in outcomes):
            self._tell(lease, wait)

    def resolve(self, key: ContentKey, outcome: Callable[[Lease], Outcome]) -> None:
        """Set the outcome of a key for all requests that wait for it."""
        for lease, interest in self._waiting.pop(key, {}).items():
            self._note(lease, key, interest, outcome(lease))

    def resolve_one(self, key: ContentKey, lease: Lease, outcome: Outcome) -> None:
        """Set the outcome of a key for one request; the others still wait."""
        self._note(lease, key, self._stop_one(key, lease), outcome)

    def stop(self, lease: Lease) -> list[ContentKey]:
        """End a request; return the keys that no request waits for any more."""
        interests = self._interests.pop(lease, {})
        waits = {wait.seq: wait for it in interests.values() for wait in it.waits}
        failure = Failure(RELEASED.code, RELEASED.message)
        for seq, wait in waits.items():
            failed: list[Outcome] = [Failed(failure) for _ in wait.keys]
            self._answers.append(Answer(lease[0], seq, failed))
        abandoned = []
        for key, interest in interests.items():
            if interest.outcome is None:
                self._stop_one(key, lease)
                if key not in self._waiting:
                    abandoned.append(key)
        return abandoned

    def validate(self) -> None:
        """Check every invariant; for tests."""
        being_made = {
            (lease, key)
            for lease, interests in self._interests.items()
            for key, interest in interests.items()
            if interest.outcome is None
        }
        if being_made != {(lease, key) for key, them in self._waiting.items() for lease in them}:
            raise StoreError("the two lists of those who wait disagree")
        if not all(self._interests.values()) or not all(self._waiting.values()):
            raise StoreError("a request that waits for nothing is remembered")
        for interests in self._interests.values():
            for key, interest in interests.items():
                for wait in interest.waits:
                    if not wait.being_made or (key in wait.being_made) == bool(interest.outcome):
                        raise StoreError("a call that could be answered still waits")

    def _stop_one(self, key: ContentKey, lease: Lease) -> _Interest:
        waiting = self._waiting[key]
        interest = waiting.pop(lease)
        if not waiting:
            del self._waiting[key]
        return interest

    def _note(self, lease: Lease, key: ContentKey, interest: _Interest, outcome: Outcome) -> None:
        """Set an outcome and answer each `Wait` that is complete, or has a key to make itself."""
        interest.outcome = outcome
        for wait in list(interest.waits):
            wait.being_made.discard(key)
            if not wait.being_made or isinstance(outcome, Owner):
                self._tell(lease, wait)

    def _tell(self, lease: Lease, wait: _Wait) -> None:
        interests = self._interests.get(lease, {})
        found = {key: interests[key] for key in wait.keys}
        outcomes = [found[key].outcome or InFlight() for key in wait.keys]
        self._answers.append(Answer(lease[0], wait.seq, outcomes))
        for key, interest in found.items():
            interest.waits.remove(wait)
            if interest.outcome is not None and not interest.waits:
                self._forget(lease, key)

    def _forget(self, lease: Lease, key: ContentKey) -> None:
        interests = self._interests[lease]
        del interests[key]
        if not interests:
            del self._interests[lease]
