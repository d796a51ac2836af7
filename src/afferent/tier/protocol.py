"""What a tier has to do: keep named values outside of this machine, each of them whole or absent.

Calls block, and come from several threads. Each ends by its deadline (of `time.monotonic`), or
raises `TierUnavailable`; "absent" is always a legal answer. A tier need not be honest: whoever
reads checks every byte (`afferent.tier.vault`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from afferent.types import GiB, KiB, MiB

PART_NBYTES = MiB
"""Values come and are checked in parts of this size; the last one is as long as what is left."""
MAX_HEAD_NBYTES = 256 * KiB
MAX_BODY_NBYTES = 4 * GiB
"""The largest body. Whoever can write to a tier can write any number there, so a number that is
read from it is compared with these limits before it is used.
"""
NAME_NBYTES = 32
"""A name is a digest."""


@dataclass(frozen=True, slots=True)
class Value:
    """``head`` says what the value is, and is there only once the whole ``body`` is."""

    name: bytes
    head: bytes
    body: memoryview


@dataclass(frozen=True, slots=True)
class Found:
    """What a tier says of a value: its head, and how long its body is. An entry that can be no
    value, such as one that is too short or too long, is found with an empty head.
    """

    head: bytes
    nbytes: int


def _accept_all(_: int) -> bool:
    return True


def _refuse_silently() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Wanted:
    """A value to be read: ``target`` is as long as its body.

    ``accept`` is told of each part, in order, as soon as it is in its place: `False` ends the
    reading of this value. Until the call returns the target is written to, by nobody afterwards.
    ``refuse`` is called when there is a value of this name whose length or type differs: it is
    wrong, not absent.
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
    """What a tier says of itself; ``None`` where it does not."""

    about: str
    used_nbytes: int | None = None
    max_nbytes: int | None = None
    advice: tuple[str, ...] = ()
    """What its operator should change."""


@runtime_checkable
class Tier(Protocol):
    """Raises `TierUnavailable` where it is down, too slow, or talks nonsense."""

    def exists_many(self, names: Sequence[bytes], *, deadline_s: float) -> list[Found | None]:
        """What there is of each, in one round trip; ``None`` for what is absent."""

    def get_many_into(self, wanted: Sequence[Wanted], *, deadline_s: float) -> list[bool]:
        """Read bodies; whether all of each was there and accepted."""

    def put_many(self, values: Sequence[Value], *, ttl_s: float, deadline_s: float) -> list[bool]:
        """Write values for ``ttl_s``; `False` for one that there is no room for. Nobody ever finds
        a part of one.
        """

    def delete_many(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        """Delete what is there of each; how many were."""

    def names(self, *, deadline_s: float) -> Iterator[bytes]:
        """The names of all values; one that comes or goes meanwhile may be among them."""

    def health(self, *, deadline_s: float) -> Health:
        """Whether it answers, and how full it is."""

    def close(self) -> None:
        """Let go of connections."""


@runtime_checkable
class Claims(Protocol):
    """What a tier may do besides: say who makes a value, so that others wait for it."""

    def claim_many(
        self, names: Sequence[bytes], *, holder: bytes, ttl_s: float, deadline_s: float
    ) -> list[bool]:
        """Whether each is ``holder``'s to make; it stops being so after ``ttl_s`` by itself."""

    def release_many(self, names: Sequence[bytes], *, holder: bytes, deadline_s: float) -> None:
        """Give back what is still this holder's."""


def num_parts(nbytes: int) -> int:
    return -(-nbytes // PART_NBYTES)


def part(body: memoryview, index: int) -> memoryview:
    return body[index * PART_NBYTES : (index + 1) * PART_NBYTES]
