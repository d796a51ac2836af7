# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards of several parts, each part switched off alone.

Where the parts do different work, a seed fails without each. Where two do the same work, a seed
fails without both, and with either it passes: see `LAYERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afferent.store.client import daemon_store
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol import requests
from afferent.store.state.budget import Budget
from afferent.store.state.index import ObjectIndex
from afferent.store.state.machine import StoreState
from tests.simulation.ablations.room import unstirred
from tests.simulation.ablations.table import Replace, ablation


@ablation("a call for room that is given up takes back what it asked for")
def _withdrawn_room(replace: Replace) -> None:
    replace(requests.Reserve, "withdrawal", lambda self: None)


@ablation("a call for a permit that is given up takes back what it asked for")
def _withdrawn_permits(replace: Replace) -> None:
    replace(requests.AcquirePermit, "withdrawal", lambda self: None)


@ablation("a client without an event loop that leaves says so")
def _heard_blocking_goodbyes(replace: Replace) -> None:
    replace(daemon_store, "leave", lambda where: None)


@ablation("what an object gives back goes to who waits for room")
def _settled_releases(replace: Replace) -> None:
    replace(Budget, "release", unstirred(Budget.release))


@ablation("what a lost client had reserved goes to who waits for room")
def _settled_drops(replace: Replace) -> None:
    replace(Budget, "drop", unstirred(Budget.drop))


@ablation("what a request did not need goes to who waits for room")
def _settled_returns(replace: Replace) -> None:
    replace(Budget, "give_back", unstirred(Budget.give_back))


@ablation("permits of a request that is released are given back")
def _released_permits(replace: Replace) -> None:
    def unretired(self: Any, lease: Any) -> Any:
        self._retire = self.flights.stop_waiting
        try:
            return release(self, lease)
        finally:
            del self._retire

    release = StoreState._release_all
    replace(StoreState, "_release_all", unretired)


@ablation("permits of a client that is lost are given back")
def _lost_permits(replace: Replace) -> None:
    def unretired(self: Any, client: int) -> Any:
        self._retire = self.flights.stop_waiting
        try:
            return lose(self, client)
        finally:
            del self._retire

    lose = StoreState._lose
    replace(StoreState, "_lose", unretired)


# Two parts that do the same work


def _daemon_takes_any_epoch(replace: Replace) -> None:
    resolve = ObjectIndex.resolve

    def of_any_epoch(self: Any, handle: Any) -> Any:
        found = self._by_generation.get(handle.generation)
        if found is not None and found.handle.offset == handle.offset:
            return found
        return resolve(self, handle)

    replace(ObjectIndex, "resolve", of_any_epoch)


def _clients_take_any_epoch(replace: Replace) -> None:
    for store in (DaemonStore, AsyncDaemonStore):
        replace(store, "block", lambda self, h: self._arena.block(h.offset, h.nbytes))


LAYERS: dict[str, tuple[Callable[[Replace], None], ...]] = {
    "epochs": (_daemon_takes_any_epoch, _clients_take_any_epoch),
}
"""The parts of an ablation that switches off several, each of which alone is enough."""
