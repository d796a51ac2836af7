"""Interface of a tier: it stores named values outside of this machine, each complete or absent.

Calls block, and come from several threads. Each ends by its deadline (of `time.monotonic`), or
raises `TierUnavailable`; "absent" is always a legal answer. A tier is not trusted: readers verify
every byte (`afferent.tier.vault`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from afferent.types import GiB, KiB, MiB

PART_NBYTES = MiB
"""Values are transferred and verified in parts of this size; the last one may be shorter."""
MAX_HEAD_NBYTES = 256 * KiB
MAX_BODY_NBYTES = 4 * GiB
"""Limit of a body. Any writer to a tier can store any number there, so numbers from it are compared
with these limits before they are used.
"""
NAME_NBYTES = 32
"""A name is a digest."""


@dataclass(frozen=True, slots=True)
class Value:
    """Value to write: ``head`` describes it, and exists only once the whole ``body`` does."""

    name: bytes
    head: bytes
    body: memoryview


@dataclass(frozen=True, slots=True)
class Found:
    """Header of a value, and the length of its body.

    An entry that can't be a value, such as one that is too short or too long, has an empty header.
    """

    head: bytes
    nbytes: int


def _accept_all(_: int) -> bool:
    return True


def _refuse_silently() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Wanted:
    """Value to read: ``target`` has the length of its body.

    ``accept`` is called with each part, in order, as soon as it is in the target; `False` ends the
    reading of this value. The target is written only until the call returns.

    ``refuse`` is called if a value of this name has another length or type: it is invalid, not
    absent.
    """

    name: bytes
    target: memoryview
    accept: Callable[[int], bool] = field(default=_accept_all)
    refuse: Callable[[], None] = field(default=_refuse_silently)

    @property
    def num_parts(self) -> int:
        return num_parts(len(self.target))

    def part(self, index: int) -> memoryview:
        return part(self.target, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of a tier, as it reports it; ``None`` for unknown values."""

    about: str
    used_nbytes: int | None = None
    max_nbytes: int | None = None
    advice: tuple[str, ...] = ()
    """Recommended changes for its operator."""


@runtime_checkable
class Tier(Protocol):
    """Store of named values; raises `TierUnavailable` if it is down, slow or its answer invalid."""

    def exists_many(self, names: Sequence[bytes], *, deadline_s: float) -> list[Found | None]:
        """Look up values, in one round trip; ``None`` if absent."""

    def get_many_into(self, wanted: Sequence[Wanted], *, deadline_s: float) -> list[bool]:
        """Read bodies; return for each whether it was complete and accepted."""

    def put_many(self, values: Sequence[Value], *, ttl_s: float, deadline_s: float) -> list[bool]:
        """Write values for ``ttl_s``; `False` if there is no space. No partial value is visible."""

    def delete_many(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        """Delete the existing values; return their number."""

    def names(self, *, deadline_s: float) -> Iterator[bytes]:
        """Yield the names of all values; values added or removed meanwhile may be among them."""

    def health(self, *, deadline_s: float) -> Health:
        """Check that it answers, and return how full it is."""

    def close(self) -> None:
        """Close the connections."""


@runtime_checkable
class Claims(Protocol):
    """Optional interface of a tier: claims to make a value, so that other nodes wait for it."""

    def claim_many(
        self, names: Sequence[bytes], *, holder: bytes, ttl_s: float, deadline_s: float
    ) -> list[bool]:
        """Return for each whether ``holder`` makes it; a claim expires after ``ttl_s``."""

    def release_many(self, names: Sequence[bytes], *, holder: bytes, deadline_s: float) -> None:
        """Release the claims that this holder still has."""


def num_parts(nbytes: int) -> int:
    return -(-nbytes // PART_NBYTES)


def part(body: memoryview, index: int) -> memoryview:
    return body[index * PART_NBYTES : (index + 1) * PART_NBYTES]
