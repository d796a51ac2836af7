# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards of blocks that are in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from afferent.builtin.engine.core.pins import Pins
from afferent.errors import StoreRestarted
from afferent.store.arena import ArenaMap
from afferent.store.daemon import client_table
from afferent.store.daemon.client_table import ClientTable, Entry
from afferent.store.daemon.main import StoreDaemon
from afferent.store.protocol import requests
from afferent.store.state.handlers import HANDLERS
from afferent.store.state.index import ObjectIndex
from afferent.store.state.machine import StoreState
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.single_flight import SingleFlight
from tests.simulation.ablations.layers import LAYERS
from tests.simulation.ablations.table import Replace, ablation


@ablation("what is pinned is not evicted")
def _pins(replace: Replace) -> None:
    replace(ObjectTable, "pin", lambda self, lease, item: None)


@ablation("a deleted object's block is freed when its last reader or writer is gone")
def _doomed_blocks(replace: Replace) -> None:
    delete = ObjectTable.delete

    def at_once(self: Any, item: Any) -> None:
        is_held = item.held
        delete(self, item)
        if is_held:
            self._leases._held = {
                lease: {g: each for g, each in held.items() if each is not item}
                for lease, held in self._leases._held.items()
            }
            self.budget.release(item.kind, item.block_nbytes)
            item.writer = None
            item.pins.clear()
            self._remove(item)

    replace(ObjectTable, "delete", at_once)
    replace(ObjectTable, "_settle", _quietly(ObjectTable._settle))
    replace(StoreState, "validate", lambda self: None)


@ablation("a block that is used again has another generation")
def _generations(replace: Replace) -> None:
    def by_place(self: Any, handle: Any) -> Any:
        if handle.segment != self.segment:
            raise StoreRestarted("of another epoch")
        for item in self._by_generation.values():
            if item.handle.offset == handle.offset:
                return item
        return resolve(self, handle)

    resolve = ObjectIndex.resolve
    replace(ObjectIndex, "resolve", by_place)


@ablation("a handle of a former epoch is refused")
def _epochs(replace: Replace) -> None:
    for switch_off in LAYERS["epochs"]:
        switch_off(replace)


@ablation("what a lost connection has pinned stays until its process is dead, or has come back")
def _death_by_pidfd(replace: Replace) -> None:
    def lets_go(self: Any, client: int) -> None:
        if client in self._clients:
            self._let_go(client)

    replace(StoreDaemon, "_on_end", lets_go)


@ablation("a job of a lost connection is handed on when its worker can't write any more")
def _jobs_wait_for_death(replace: Replace) -> None:
    lost = SingleFlight.client_lost

    def at_once(self: Any, client: int, *, now_s: float) -> None:
        lost(self, client, now_s=now_s)
        self.maker_died(client, now_s=now_s)

    replace(SingleFlight, "client_lost", at_once)


@ablation("a new daemon waits until nobody uses the arena of the former epoch")
def _recovery(replace: Replace) -> None:
    replace(
        StoreDaemon, "_await_former", lambda self, entry: self._client_table.remove(entry.client)
    )


@ablation("a client is written down before it is given the arena")
def _written_down(replace: Replace) -> None:
    add, remove = ClientTable.add, ClientTable.remove
    gone: set[int] = set()

    def later(self: Any, client: int, pid: int, token: int) -> None:
        gone.discard(client)

        def write() -> None:
            if client not in gone:
                add(self, client, pid, token)

        asyncio.get_running_loop().call_later(0.5, write)

    def forget(self: Any, client: int) -> None:
        gone.add(client)
        remove(self, client)

    replace(ClientTable, "add", later)
    replace(ClientTable, "remove", forget)


@ablation("a process that has got a dead one's pid is not waited for, nor killed")
def _start_times(replace: Replace) -> None:
    def open_pidfd(self: Any) -> int | None:
        try:
            return int(client_table.os.pidfd_open(self.pid))
        except ProcessLookupError:
            return None

    replace(Entry, "open_pidfd", open_pidfd)


@ablation("a client comes back when it uses nothing of the former life of its connection")
def _retired_maps(replace: Replace) -> None:
    replace(ArenaMap, "retire", lambda self, on_unused: on_unused() and None)


@ablation("who says hello again lets go of what it held before")
def _hello_lets_go(replace: Replace) -> None:
    replace(StoreDaemon, "_forget", lambda self, token: None)


@ablation("what was computed from an object is sealed while the object is pinned")
def _sources(replace: Replace) -> None:
    seal = StoreState._seal

    def without(self: Any, client: int, request: Any) -> Any:
        for item in request.items:
            item.sources = []
        return seal(self, client, request)

    replace(HANDLERS, requests.Seal, without)


@ablation("what a step looks at is pinned for each worker too, not for the core alone")
def _pinned_for_workers(replace: Replace) -> None:
    async def for_the_core(self: Any, lease: str, items: Any, clients: Any) -> list[int]:
        if not items:
            return []
        await self._store.get(lease, [item.handle for item in items])
        return list(clients)

    replace(Pins, "_pin", for_the_core)


# Tools


def _quietly(call: Callable[..., Any]) -> Callable[..., Any]:
    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (KeyError, ValueError):
            return None

    return tried
