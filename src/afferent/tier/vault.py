"""Values in a tier, sealed when they are written, and verified when they are read.

An invalid value is deleted and counted, and treated as absent: the caller makes it again.
"""

from __future__ import annotations

import logging
import time
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
"""Result of a write; except for ``full``, the value is now in the tier."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Body to read into ``target``, which is at least as long."""

    head: Head
    target: memoryview


class Body(NamedTuple):
    """Body to write."""

    key: ContentKey
    kind: ObjectKind
    data: memoryview


class Vault:
    """Sealed access to one tier, with the secret of the fleet. Thread-safe."""

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
        """Return the headers of the existing values, in one round trip.

        Args:
            rejected: Receives the keys of invalid values, which are no evidence for the hit rate.

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
        """Read bodies; return for each whether it is complete and every byte is verified.

        Bodies that were complete before the tier failed count. For ``rejected`` see `look_up`.
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
        # All checks are awaited: after this returns, no thread reads the targets.
        are_good = [reading.is_good() for reading in readings]
        bad = []
        wrong = [
            wish.head for wish, is_good in zip(wishes, are_good, strict=True) if is_good is False
        ]
        replaced = self._replaced(wrong, deadline_s) if wrong else set()
        for wish, one, was_read, is_good in zip(wishes, wanted, were_read, are_good, strict=True):
            if is_good is False:
                _note(wish.head.key, rejected)
                if wish.head.key in replaced:
                    continue
                self._reject("body", wish.head.key, "a part has another digest or length")
            # Parts are missing: evicted one by one, or never written. A header without its parts is
            # useless.
            if is_good is False or (failure is None and not was_read):
                bad.append(one.name)
        self._delete(bad, deadline_s)
        if failure is not None and not any(are_good):
            raise failure
        return [is_good is True for is_good in are_good]

    def reject(self, key: ContentKey, why: str, *, deadline_s: float) -> None:
        """Count and delete a value with a valid seal and invalid content for its kind."""
        self._reject("body", key, why)
        self._delete([self._sealer.name_of(key)], deadline_s)

    def put(
        self, bodies: Sequence[Body], *, ttl_s: float, deadline_s: float, replaces: bool = False
    ) -> list[Put]:
        """Write absent values; return the result for each.

        Args:
            replaces: Write existing values too, as they may be outdated.
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
        """Return for each whether this holder makes it; true for all if the tier has no claims."""
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

    def heads(self, *, timeout_s: float) -> Iterator[tuple[bytes, Head | None]]:
        """Yield all names with their headers; ``None`` if this fleet has not sealed the value.

        Args:
            timeout_s: Of the list of names, and then of each look-up.

        Raises:
            TierUnavailable: It has no answer in time.
        """
        # All at once: the list's deadline must not depend on the caller.
        for name in list(self.tier.names(deadline_s=time.monotonic() + timeout_s)):
            (found,) = self.tier.exists_many([name], deadline_s=time.monotonic() + timeout_s)
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

    def _replaced(self, heads: Sequence[Head], deadline_s: float) -> set[ContentKey]:
        """Return the keys of values that were replaced or deleted since their headers were read.

        Their bodies are of another value then, and nothing is wrong with it. The same holds if the
        tier can't tell.
        """
        try:
            found = self.tier.exists_many(
                [self._sealer.name_of(head.key) for head in heads], deadline_s=deadline_s
            )
        except TierUnavailable:
            return {head.key for head in heads}
        pairs = zip(heads, found, strict=True)
        return {head.key for head, one in pairs if one is None or self._is_another(one, head)}

    def _is_another(self, found: Found, head: Head) -> bool:
        try:
            return self._sealer.open(found.head, head.key) != head
        except FormatError:
            return False

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
    """Parts of one body as they arrive. Long bodies are verified while further parts arrive."""

    def __init__(self, wish: Wish, hashers: ThreadPoolExecutor) -> None:
        self._head, self._target = wish.head, wish.target[: wish.head.nbytes]
        self._hashers = hashers
        self._checks: list[Future[bool]] = []
        self._num_accepted = 0
        self._is_bad = False

    def accept(self, index: int) -> bool:
        """Accept the next part; `False` if the body is already known to be invalid."""
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
        """Note that the value has another length."""
        self._is_bad = True

    def is_good(self) -> bool | None:
        """Return the result after the last part; ``None`` if parts are missing and none is bad."""
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
