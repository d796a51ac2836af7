"""Values in a tier, sealed when they are written, and checked while they are read.

What is not as it was sealed is deleted, counted, and absent: the caller makes it anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from afferent.errors import FormatError, TierUnavailable
from afferent.runtime.logs import Seldom
from afferent.telemetry.registry import counter
from afferent.tier.protocol import Claims, Found, Tier, Value, Wanted
from afferent.tier.sealed import Head, Sealer, check_key
from afferent.types import ContentKey, ObjectKind

log = logging.getLogger(__name__)

REJECTED = counter(
    "afferent_tier_rejected_total",
    "Values of a tier that were not what they should have been: deleted, and made anew",
    what=("head", "body"),
)
_KEY_AT = slice(24, 56)

Put = Literal["written", "there", "full"]
"""What became of a value that was to be written: it is there now but for ``full``."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A body to be read, and where to: ``target`` is at least as long as it."""

    head: Head
    target: memoryview


class Body(NamedTuple):
    """What is to be written."""

    key: ContentKey
    kind: ObjectKind
    data: memoryview


class Vault:
    """One tier, with the secret of the fleet. For several threads."""

    def __init__(self, tier: Tier, sealer: Sealer) -> None:
        self.tier, self._sealer = tier, sealer
        self._hashers = ThreadPoolExecutor(2, thread_name_prefix="digest")
        self._seldom = Seldom(log)

    @property
    def can_claim(self) -> bool:
        return isinstance(self.tier, Claims)

    def look_up(
        self,
        keys: Sequence[ContentKey],
        *,
        deadline_s: float,
        rejected: set[ContentKey] | None = None,
    ) -> list[Head | None]:
        """What there is of each, in one round trip.

        Args:
            rejected: Gets the keys whose values were wrong: they say nothing of what the tier has.

        Raises:
            TierUnavailable: It has no answer by the deadline.
        """
        names = [self._sealer.name_of(key) for key in keys]
        found = self.tier.exists_many(names, deadline_s=deadline_s)
        heads: list[Head | None] = []
        bad: list[bytes] = []
        for key, name, one in zip(keys, names, found, strict=True):
            head = None
            if one is not None:
                head = self._open(one, key)
                if head is None:
                    bad.append(name)
                    _note(key, rejected)
            heads.append(head)
        self._delete(bad, deadline_s)
        return heads

    def fetch(
        self,
        wishes: Sequence[Wish],
        *,
        deadline_s: float,
        rejected: set[ContentKey] | None = None,
    ) -> list[bool]:
        """Read bodies; whether each is in its place, and every byte of it checked.

        What came before the tier failed is there all the same. For ``rejected`` see `look_up`.
        """
        readings = [_Reading(wish, self._hashers) for wish in wishes]
        wanted = [
            Wanted(
                self._sealer.name_of(wish.head.key),
                wish.target[: wish.head.nbytes],
                each.accept,
                each.refuse,
            )
            for wish, each in zip(wishes, readings, strict=True)
        ]
        failure = None
        were_read = [False] * len(wanted)
        try:
            were_read = self.tier.get_many_into(wanted, deadline_s=deadline_s)
        except TierUnavailable as error:
            failure = error
        # Whatever was read is looked at to its end: nobody reads the targets after this returns.
        are_good = [reading.is_good() for reading in readings]
        bad = []
        for wish, one, was_read, is_good in zip(wishes, wanted, were_read, are_good, strict=True):
            if is_good is False:
                self._reject("body", wish.head.key, "a part has another digest or length")
                _note(wish.head.key, rejected)
            # Parts that are missing: evicted one by one, or never written. A head without them is
            # of no use to anybody.
            if is_good is False or (failure is None and not was_read):
                bad.append(one.name)
        self._delete(bad, deadline_s)
        if failure is not None and not any(are_good):
            raise failure
        return [is_good is True for is_good in are_good]

    def reject(self, key: ContentKey, why: str, *, deadline_s: float) -> None:
        """Count and delete a value that is sealed rightly, and is not what its kind says."""
        self._reject("body", key, why)
        self._delete([self._sealer.name_of(key)], deadline_s)

    def put(
        self, bodies: Sequence[Body], *, ttl_s: float, deadline_s: float, replaces: bool = False
    ) -> list[Put]:
        """Write what is not there; what became of each.

        Args:
            replaces: What is there may say something else by now.
        """
        names = [self._sealer.name_of(body.key) for body in bodies]
        there: Sequence[Found | None] = [None] * len(names)
        if not replaces:
            there = self.tier.exists_many(names, deadline_s=deadline_s)
        missing = [index for index, found in enumerate(there) if found is None]
        values = [
            Value(names[index], self._sealer.seal(body.key, body.kind, body.data), body.data)
            for index, body in ((index, bodies[index]) for index in missing)
        ]
        written = self.tier.put_many(values, ttl_s=ttl_s, deadline_s=deadline_s) if values else []
        puts: list[Put] = ["there"] * len(names)
        for index, is_written in zip(missing, written, strict=True):
            puts[index] = "written" if is_written else "full"
        return puts

    def claim(
        self, keys: Sequence[ContentKey], *, holder: bytes, ttl_s: float, deadline_s: float
    ) -> list[bool]:
        """Whether each is this holder's to make; all are where nobody can say."""
        if not isinstance(self.tier, Claims):
            return [True] * len(keys)
        names = [self._sealer.name_of(key) for key in keys]
        return self.tier.claim_many(names, holder=holder, ttl_s=ttl_s, deadline_s=deadline_s)

    def release(self, keys: Sequence[ContentKey], *, holder: bytes, deadline_s: float) -> None:
        if isinstance(self.tier, Claims) and keys:
            names = [self._sealer.name_of(key) for key in keys]
            self.tier.release_many(names, holder=holder, deadline_s=deadline_s)

    # For operators

    def name_of(self, key: ContentKey) -> bytes:
        return self._sealer.name_of(key)

    def heads(self, *, deadline_s: float) -> Iterator[tuple[bytes, Head | None]]:
        """All that is there, by name; ``None`` for what is not sealed as this fleet seals."""
        for name in self.tier.names(deadline_s=deadline_s):
            (found,) = self.tier.exists_many([name], deadline_s=deadline_s)
            if found is None:
                continue
            try:
                key = check_key(found.head[_KEY_AT])
                head = self._sealer.open(found.head, key)
                is_named = self._sealer.name_of(key) == name and head.nbytes == found.nbytes
            except FormatError:
                is_named = False
            yield name, head if is_named else None

    def close(self) -> None:
        self._hashers.shutdown()
        self.tier.close()

    def _open(self, found: Found, key: ContentKey) -> Head | None:
        try:
            head = self._sealer.open(found.head, key)
        except FormatError as error:
            self._reject("head", key, error.message)
            return None
        if head.nbytes != found.nbytes:
            self._reject("head", key, "a body has another length than its head says")
            return None
        return head

    def _delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        if not names:
            return
        try:
            self.tier.delete_many(names, deadline_s=deadline_s)
        except TierUnavailable:
            log.info("what was wrong in the tier could not be deleted")

    def _reject(self, what: str, key: ContentKey, why: str) -> None:
        REJECTED.labels(what).inc()
        self._seldom.warning("a value of the tier was refused", reason=why, key=key.hex())


def _note(key: ContentKey, rejected: set[ContentKey] | None) -> None:
    if rejected is not None:
        rejected.add(key)


class _Reading:
    """The parts of one body as they come. Long ones are checked while the next come."""

    def __init__(self, wish: Wish, hashers: ThreadPoolExecutor) -> None:
        self._head, self._target = wish.head, wish.target[: wish.head.nbytes]
        self._hashers = hashers
        self._checks: list[Future[bool]] = []
        self._num_accepted = 0
        self._is_bad = False

    def accept(self, index: int) -> bool:
        """Whether this part, as far as is known yet, is what it should be."""
        if index != self._num_accepted:
            self._is_bad = True
            return False
        self._num_accepted += 1
        check = partial(self._check, index)
        if len(self._head.digests) == 1:
            self._is_bad |= not check()
        else:
            self._checks.append(self._hashers.submit(check))
        return not self._is_bad

    def refuse(self) -> None:
        """What is there has another length."""
        self._is_bad = True

    def is_good(self) -> bool | None:
        """Once nothing comes any more; ``None`` if not all has come, and what has is right."""
        results = [check.result() for check in self._checks]
        if self._is_bad or not all(results):
            return False
        return True if self._num_accepted == len(self._head.digests) else None

    def _check(self, index: int) -> bool:
        from_byte = Wanted(b"", self._target).part(index)
        is_right = self._head.has(index, from_byte)
        if not is_right:
            self._is_bad = True
        return is_right
