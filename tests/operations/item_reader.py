"""A reader of item events as another project would write it: from the documented fields alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END, NOT_ANSWERED = ((-number).to_bytes(8, "big", signed=True) for number in (1, 2))
_ANSWER_S = 20.0


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The fields of vLLM's ``EventBatch``."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


@dataclass(slots=True)
class ItemReader:
    """Items of one server, kept up to date.

    ``loses`` decides which messages never arrive.
    """

    endpoint: str
    requests: str
    key: str = ""
    loses: Callable[[int], bool] = lambda _: False
    items: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    seq: int = -1
    num_lists: int = 0
    num_replays: int = 0
    sockets: list[zmq.asyncio.Socket] = field(default_factory=list)
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)

    def socket(self, kind: int, endpoint: str, *, receives: int = 1000) -> zmq.asyncio.Socket:
        """Connect; ``receives`` is the number of messages that may wait here."""
        found = self.context.socket(kind)
        self.sockets.append(found)
        found.setsockopt(zmq.RCVHWM, receives)
        if self.key:
            found.setsockopt(zmq.PLAIN_USERNAME, b"afferent")
            found.setsockopt(zmq.PLAIN_PASSWORD, self.key.encode())
        if kind == zmq.SUB:
            found.setsockopt(zmq.SUBSCRIBE, b"items")
        found.connect(endpoint)
        return found

    def close(self) -> None:
        for each in self.sockets:
            each.close(linger=0)
        self.context.destroy(linger=0)

    async def follow(self) -> None:
        """Follow for ever."""
        events = self.socket(zmq.SUB, self.endpoint)
        requests = self.socket(zmq.DEALER, self.requests)
        while True:
            topic, packed, payload = await events.recv_multipart()
            seq = int.from_bytes(packed, "big")
            if self.loses(seq):
                continue
            assert topic == b"items"
            if seq > self.seq + 1:
                await self.replay(requests)
            if seq == self.seq + 1:
                self.apply(payload)
                self.seq = seq

    def apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            match event:
                case {"type": "ItemStored", "name": name, "kind": kind}:
                    self.items[name, kind] = event
                case {"type": "ItemRemoved", "name": name, "kind": kind}:
                    self.items.pop((name, kind), None)
                case {"type": "AllItemsCleared"}:
                    self.items.clear()
                case _:
                    raise AssertionError(event)

    async def replay(self, requests: zmq.asyncio.Socket) -> None:
        self.num_replays += 1
        answer = await ask(requests, [(self.seq + 1).to_bytes(8, "big")])
        if not answer or answer[0][0] != self.seq + 1:  # it does not reach back so far
            await self.list_all(requests)
            return
        for seq, payload in answer:
            self.apply(payload)
            self.seq = seq

    async def list_all(self, requests: zmq.asyncio.Socket) -> None:
        self.num_lists += 1
        for seq, payload in await ask(requests, [b"list"]):
            self.apply(payload)
            self.seq = seq


async def ask(
    requests: zmq.asyncio.Socket, frames: Sequence[bytes], *, pause_s: float = 0.0
) -> list[tuple[int, bytes]]:
    """Send a request; return the numbers and batches of its answer.

    Args:
        pause_s: Pause before each message.

    Raises:
        LookupError: It is not answered.
    """
    await requests.send_multipart([b"", *frames])
    answer = []
    async with asyncio.timeout(_ANSWER_S):
        while True:
            await asyncio.sleep(pause_s)
            empty, _, packed, payload = await requests.recv_multipart()
            assert empty == b""
            if packed == END:
                return answer
            if packed == NOT_ANSWERED:
                raise LookupError("the request could not be answered")
            answer.append((int.from_bytes(packed, "big"), payload))
