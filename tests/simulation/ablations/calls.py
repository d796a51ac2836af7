# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards of calls and connections."""

from __future__ import annotations

from typing import Any

from afferent.runtime import wire
from afferent.store.client import async_store, daemon_store
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.client_table import ClientTable
from afferent.store.protocol import requests
from afferent.store.state.budget import Budget
from afferent.store.state.handlers import HANDLERS
from afferent.store.state.machine import StoreState
from afferent.store.state.report import Client
from afferent.store.state.waiters import Waiters
from tests.simulation.ablations.table import Replace, ablation


@ablation("a call that is given up takes back what it asked for")
def _withdrawals(replace: Replace) -> None:
    for verb in (requests.Reserve, requests.Create, requests.AcquirePermit):
        replace(verb, "withdrawal", lambda self: None)
    # A released request takes everything back; the simulation's late calls are checked before that.


@ablation("a call ends by its deadline")
def _deadlines(replace: Replace) -> None:
    replace(async_store, "_expire", lambda future: None)


@ablation("what a refused call was never given is not taken back")
def _refused_calls(replace: Replace) -> None:
    def take_back(self: Any, lease: Any, amounts: Any, *, ticket: Any) -> None:
        self.give_back(lease, amounts)

    replace(Budget, "take_back", take_back)


@ablation("a call that waits fails when its request is released")
def _released_calls(replace: Replace) -> None:
    stop = Waiters.stop

    def silently(self: Any, lease: Any) -> Any:
        count = len(self._answers)
        found = stop(self, lease)
        del self._answers[count:]
        return found

    replace(Waiters, "stop", silently)


@ablation("nothing is done for a client that is lost")
def _lost_clients(replace: Replace) -> None:
    handle = StoreState.handle

    def for_all(self: Any, client: int, request: Any, *, now_s: float) -> Any:
        known = self._clients.get(client)
        if known is not None and known.connected:
            return handle(self, client, request, now_s=now_s)
        self._clients[client] = Client("", 0)
        try:
            replies = handle(self, client, request, now_s=now_s)
        finally:
            del self._clients[client]
            if known is not None:
                self._clients[client] = known
        return [(other, reply) for other, reply in replies if other != client]

    replace(StoreState, "handle", for_all)


@ablation("pins are taken only for clients that are there")
def _absent_clients(replace: Replace) -> None:
    def anyhow(self: Any, client: int, request: Any) -> None:
        found = self.objects.resolve_sealed(request.handles)
        self.objects.pin_all((client, request.request), found)
        for number in request.also_for:
            for item in found:
                self.objects.pin((number, request.request), item)

    replace(HANDLERS, requests.Get, anyhow)


@ablation("a client's number is never another's")
def _new_numbers(replace: Replace) -> None:
    def again(self: Any) -> int:
        taken = set(self._rows)
        return next(n for n in range(1, 10**6) if n not in taken)

    replace(ClientTable, "new_client", again)


@ablation("a call takes no answer but its own")
def _own_answers(replace: Replace) -> None:
    decode = daemon_store.decode
    replace(daemon_store, "decode", lambda decoder, frame: _Agreeable(decode(decoder, frame)))


@ablation("a connection on which a message was sent in part is given up")
def _torn_messages(replace: Replace) -> None:
    send = wire.SyncChannel.send

    def whole(self: Any, payload: bytes, *, timeout_s: float | None) -> None:
        try:
            send(self, payload, timeout_s=timeout_s)
        finally:
            self.is_torn = False

    replace(wire.SyncChannel, "send", whole)


@ablation("a client that leaves says so until it is heard")
def _heard_goodbyes(replace: Replace) -> None:
    replace(async_store, "leave", lambda where: None)
    replace(daemon_store, "leave", lambda where: None)


@ablation("a client that has lost the daemon comes back")
def _coming_back(replace: Replace) -> None:
    async def never(self: Any) -> None:
        return None

    replace(AsyncDaemonStore, "_reconnect", never)


# Tools


class _Agreeable:
    """A reply that claims to answer any call."""

    def __init__(self, reply: Any) -> None:
        self.result, self.failure, self.seq = reply.result, reply.failure, _Equal()


class _Equal:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
