# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards against lost wake-ups: without them, a call waits for a later event or deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from afferent.store.client import async_store
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.main import StoreDaemon
from afferent.store.state.budget import Budget
from afferent.store.state.keeping import KeepQueue
from afferent.store.state.waiters import Waiters
from tests.simulation.ablations.table import Replace, ablation


@ablation("when a connection ends, calls of others that can go on are answered")
def _answers_at_an_end(replace: Replace) -> None:
    replace(StoreDaemon, "_on_end", _unheard(StoreDaemon._on_end))


@ablation("when a client has died, calls of others that can go on are answered")
def _answers_at_a_death(replace: Replace) -> None:
    replace(StoreDaemon, "_let_go", _unheard(StoreDaemon._let_go))


@ablation("calls under way fail when the connection is lost")
def _failed_calls(replace: Replace) -> None:
    on_close = AsyncDaemonStore._on_close

    def silently(self: Any) -> None:
        calls, self._calls = self._calls, {}
        try:
            on_close(self)
        finally:
            self._calls = calls

    replace(AsyncDaemonStore, "_on_close", silently)


@ablation("what ends a request is sent at once")
def _sent_releases(replace: Replace) -> None:
    def unsent(self: Any, request: Any) -> None:
        if self._owner.is_here and self.is_open:
            self._unsent.append(async_store.wire.pack_frame(async_store.encode(request)))

    replace(AsyncDaemonStore, "_tell", unsent)


@ablation("a client that uses nothing of the arena any more connects again at once")
def _stirred_clients(replace: Replace) -> None:
    async def looks_later(self: Any) -> None:
        unused: list[bool] = []
        self._arena.retire(lambda: unused.append(True))
        while not unused:
            await asyncio.sleep(1.0)

    replace(AsyncDaemonStore, "_until_unused", looks_later)


@ablation("the thread that connects again is woken when a call gives its connection up")
def _woken_threads(replace: Replace) -> None:
    lose = DaemonStore._lose

    def silently(self: Any) -> None:
        self._wake = lambda: None
        try:
            lose(self)
        finally:
            del self._wake

    replace(DaemonStore, "_lose", silently)


@ablation("who waits for other kinds of room is not behind who is next")
def _other_kinds(replace: Replace) -> None:
    next_one = Budget._next

    def of_all(self: Any, blocked: Any) -> Any:
        return None if blocked else next_one(self, blocked)

    replace(Budget, "_next", of_all)


@ablation("who comes to keep something is given what waits for that")
def _idle_keepers(replace: Replace) -> None:
    def only_noted(self: Any, client: int, seq: int) -> None:
        self._keepers.add(client)
        self._idle.append((client, seq))

    replace(KeepQueue, "keeper_idle", only_noted)


@ablation("who waits for several objects is answered when the last of them has an end")
def _last_objects(replace: Replace) -> None:
    tell = Waiters._tell

    def of_one(self: Any, lease: Any, wait: Any) -> None:
        if len(wait.keys) == 1:
            tell(self, lease, wait)

    replace(Waiters, "_tell", of_one)


# Tools


def _unheard(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the daemon so that it sends no replies."""

    def quiet(self: Any, *args: Any) -> Any:
        send, self._send = self._send, lambda replies: None
        try:
            return call(self, *args)
        finally:
            self._send = send

    return quiet
