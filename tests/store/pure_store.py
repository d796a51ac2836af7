"""A store without a process or a socket: clients send requests, and the test reads the replies."""

from __future__ import annotations

from typing import Any

import msgspec

from afferent.store.protocol import requests
from afferent.store.protocol.items import Claim, Queue, SealItem
from afferent.store.protocol.replies import Reply
from afferent.store.protocol.results import Order, Outcome
from afferent.store.state.machine import Replies, StoreState
from afferent.store.state.region import Shares
from afferent.types import CreateItem, Failure, Handle, ObjectKind, ReserveItem
from tests.store.outcomes import failure_of

FRONTEND, OTHER, WORKER, SECOND = 1, 2, 3, 4
KEY, KEY_2 = b"k" * 32, b"l" * 32
RAW, FEATURES = ObjectKind.RAW, ObjectKind.FEATURES
HALVES = {RAW: 0.5, FEATURES: 0.5}
BAD = Failure("invalid_media", "truncated")


class Store:
    """A `StoreState` with four clients, and the replies to each client."""

    def __init__(self, capacity_nbytes: int = 1 << 20, *, shares: Shares = HALVES) -> None:
        self.state = StoreState(capacity_nbytes, segment=1, shares=shares)
        self.seq = 0
        self.now_s = 0.0
        self.inbox: dict[int, list[Reply]] = {client: [] for client in (1, 2, 3, 4)}
        for client in self.inbox:
            self.state.connect(client, name=f"client {client}", pid=1000 + client)

    def send(self, client: int, kind: Any, *arguments: Any) -> int:
        self.seq += 1
        request = kind(self.seq, *arguments)
        self._deliver(self.state.handle(client, request, now_s=self.now_s))
        return self.seq

    def call(self, client: int, kind: Any, *arguments: Any, returns: Any = None) -> Any:
        return self.result(client, self.send(client, kind, *arguments), returns)

    def refusal(self, client: int, kind: Any, *arguments: Any) -> str:
        """Return the error code with which this call fails."""
        return self.failure(client, self.send(client, kind, *arguments))

    def failure(self, client: int, seq: int) -> str:
        reply = self.answer(client, seq)
        assert reply is not None
        assert reply.failure is not None
        return reply.failure.code

    def result(self, client: int, seq: int, returns: Any = None) -> Any:
        reply = self.answer(client, seq)
        assert reply is not None
        assert reply.failure is None, reply.failure
        return msgspec.msgpack.decode(reply.result, type=returns or Any)

    def answer(self, client: int, seq: int) -> Reply | None:
        found = [reply for reply in self.inbox[client] if reply.seq == seq]
        assert len(found) <= 1
        return found[0] if found else None

    def die(self, client: int) -> None:
        self._deliver(self.state.client_died(client, now_s=self.now_s))

    def disconnect(self, client: int) -> None:
        self._deliver(self.state.disconnect(client, now_s=self.now_s))

    def _deliver(self, replies: Replies) -> None:
        for client, reply in replies:
            self.inbox[client].append(reply)
        self.state.validate()

    # Usual steps

    def create(
        self, client: int, request: str, *sizes: int, kind: ObjectKind = RAW
    ) -> list[Handle]:
        items = [CreateItem(kind, nbytes) for nbytes in sizes]
        created: list[Handle] = self.call(
            client, requests.Create, request, items, returns=list[Handle]
        )
        return created

    def seal(self, client: int, request: str, *handles: Handle | None) -> None:
        items = [SealItem(handle, handle.nbytes) for handle in handles if handle is not None]
        assert len(items) == len(handles)
        self.call(client, requests.Seal, request, items)

    def raw(self, client: int, request: str) -> Handle:
        (handle,) = self.create(client, request, 100)
        self.seal(client, request, handle)
        return handle

    def acquire(self, client: int, request: str, key: bytes = KEY) -> Outcome:
        """Request an object that a worker makes, from new raw media."""
        handle = self.raw(client, request)
        item = Queue(key, FEATURES, 1000, [handle], b"how")
        (outcome,) = self.call(client, requests.Acquire, request, [item], returns=list[Outcome])
        self.call(client, requests.Release, request, [handle])
        found: Outcome = outcome
        return found

    def claim(self, client: int, request: str, *keys: bytes, nbytes: int = 1000) -> list[Outcome]:
        """Request objects that the client makes itself where they are missing."""
        items = [Claim(key, FEATURES, nbytes) for key in keys or (KEY,)]
        outcomes: list[Outcome] = self.call(
            client, requests.Acquire, request, items, returns=list[Outcome]
        )
        return outcomes

    def wait(self, client: int, request: str, *keys: bytes) -> int:
        return self.send(client, requests.Wait, request, list(keys or (KEY,)))

    def outcomes(self, client: int, seq: int) -> list[Outcome]:
        found: list[Outcome] = self.result(client, seq, list[Outcome])
        return found

    def outcome(self, client: int, seq: int) -> Outcome:
        (found,) = self.outcomes(client, seq)
        return found

    def reserve(
        self, client: int, request: str, nbytes: int, *, kind: ObjectKind = RAW, queue: bool = True
    ) -> int:
        return self.send(client, requests.Reserve, request, [ReserveItem(kind, nbytes)], queue)

    def release(self, client: int, request: str) -> None:
        self.call(client, requests.Release, request, None)

    def take(self, worker: int) -> Order:
        order = self.call(worker, requests.Take, returns=Order)
        assert isinstance(order, Order)
        return order

    def finish(self, worker: int, order: Order, failure: Failure | None = None) -> None:
        self.call(worker, requests.Finish, order.job, 0 if failure else 900, failure, [])


def code(outcome: Outcome) -> str:
    return failure_of(outcome).code
