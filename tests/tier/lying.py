"""A tier in this process's memory that can return wrong data, fail, and be slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from afferent.errors import TierUnavailable
from afferent.tier.protocol import Found, Health, Value, Wanted, part

Change = Callable[[int, memoryview], bytes | None]
"""Changes a part that is read; with ``None`` the read fails there."""


class Lying:
    """A tier in memory that changes the values it returns."""

    def __init__(self) -> None:
        self.values: dict[bytes, Value] = {}
        self.change: Change = lambda _, data: bytes(data)
        self.num_parts_read = 0
        self.faults: dict[str, Fault] = {}
        self.calls: list[str] = []
        self.claims: dict[bytes, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def exists_many(self, names: Sequence[bytes], *, deadline_s: float) -> list[Found | None]:
        self._begin("look-up", deadline_s)
        found = [self.values.get(name) for name in names]
        return [None if one is None else Found(one.head, len(one.body)) for one in found]

    def get_many_into(self, wanted: Sequence[Wanted], *, deadline_s: float) -> list[bool]:
        self._begin("fetch", deadline_s)
        return [self._read(one) for one in wanted]

    def _read(self, one: Wanted) -> bool:
        if (value := self.values.get(one.name)) is None or len(value.body) != len(one.target):
            return False
        for index in range(one.num_parts):
            data = self.change(index, part(value.body, index))
            if data is None:
                raise TierUnavailable("it is gone")
            one.part(index)[:] = data
            self.num_parts_read += 1
            if not one.accept(index):
                return False
        return True

    def put_many(self, values: Sequence[Value], *, ttl_s: float, deadline_s: float) -> list[bool]:
        self._begin("write-behind", deadline_s)
        for value in values:
            self.values[value.name] = Value(
                value.name, value.head, memoryview(bytearray(value.body))
            )
        return [True] * len(values)

    def delete_many(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        return sum(self.values.pop(name, None) is not None for name in names)

    def names(self, *, deadline_s: float) -> Iterator[bytes]:
        return iter(list(self.values))

    def health(self, *, deadline_s: float) -> Health:
        self._begin("health", deadline_s)
        return Health(about="a liar")

    def close(self) -> None:
        pass

    def claim_many(
        self, names: Sequence[bytes], *, holder: bytes, ttl_s: float, deadline_s: float
    ) -> list[bool]:
        self._begin("claim", deadline_s)
        now_s = time.monotonic()
        with self._lock:
            return [self._claim(name, holder, now_s, ttl_s) for name in names]

    def _claim(self, name: bytes, holder: bytes, now_s: float, ttl_s: float) -> bool:
        if self.claims.get(name, (b"", 0.0))[1] > now_s:
            return False
        self.claims[name] = (holder, now_s + ttl_s)
        return True

    def release_many(self, names: Sequence[bytes], *, holder: bytes, deadline_s: float) -> None:
        self._begin("release", deadline_s)
        with self._lock:
            for name in names:
                if self.claims.get(name, (b"", 0.0))[0] == holder:
                    del self.claims[name]

    def _begin(self, what: str, deadline_s: float) -> None:
        self.calls.append(what)
        if (fault := self.faults.get(what)) is not None:
            fault(deadline_s)


Fault = Callable[[float], None]
"""The behaviour of a call, given its deadline."""


def dies(_: float) -> None:
    raise TierUnavailable("it is gone")


def hangs(deadline_s: float) -> None:
    """Hang until the deadline, which every tier observes."""
    time.sleep(max(0.0, deadline_s - time.monotonic()))
    raise TierUnavailable("no answer in time")


def is_slow(_: float) -> None:
    time.sleep(0.1)


def fails(_: float) -> None:
    """Raise an error that a tier must not raise."""
    raise ZeroDivisionError
