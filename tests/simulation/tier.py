"""Processes of a tier: they succeed, find nothing, or hang until they are killed."""

from __future__ import annotations

import random

import msgspec

from afferent.errors import AfferentError, StoreUnavailable
from afferent.store.protocol.results import Fetching, Keeping
from afferent.types import Failure
from tests.simulation.oracle import number_of
from tests.simulation.sizes import sleep
from tests.simulation.workers import Blocking

_ABSENT = Failure("absent", "not there")


class _Tier(Blocking):
    def _work(self) -> None:
        rng = random.Random(f"{self._plan.seed} {self._process.name} {self._process.start_ticks}")
        while True:
            try:
                self._do(rng)
            except StoreUnavailable:
                sleep(0.1)
            except AfferentError:
                continue

    def _do(self, rng: random.Random) -> None:
        raise NotImplementedError


class Fetcher(_Tier):
    """Fetches what a worker would have made; a fetch may fail after part of it was written."""

    def _do(self, rng: random.Random) -> None:
        order = self._store.take("fetch")
        what = number_of(msgspec.msgpack.decode(order.payload, type=Fetching).key)
        fate = rng.random()
        may_hang = self._plan.recovery_timeout_s is not None and not self._world.is_healed
        if fate < 0.3:
            self._store.finish(order, failure=_ABSENT)
            return
        pause_s = rng.choice((1e-4, 1e-2, 1e-1))
        if fate < 0.4 and may_hang:
            pause_s = 1e9
        used_nbytes = self._write(order.target, what, pause_s=pause_s)
        if fate < 0.6:  # a fetch that fails at its last byte
            self._store.finish(order, failure=_ABSENT)
            return
        self._world.oracle.made(order.target, what)
        self._store.finish(order, used_nbytes=used_nbytes)


class Keeper(_Tier):
    """Reads objects of the write-behind queue while they are pinned."""

    def _do(self, rng: random.Random) -> None:
        order = self._store.take("keep")
        keeping = msgspec.msgpack.decode(order.payload, type=Keeping)
        try:
            self._read(order.target, number_of(keeping.key))
            sleep(rng.choice((1e-4, 1e-2, 0.3)))
        finally:
            self._store.forget(keeping.request)
