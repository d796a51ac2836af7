"""Follower of a server's item events: which media the server has, by their placement digests.

The messages are those of `afferent.engines.item_events`. Wrong events cost a miss, never a wrong
answer: they only change which server gets a request first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct

from afferent.engines.item_events import (
    END,
    LIST,
    TOPIC,
    USER,
    AllItemsCleared,
    ItemRemoved,
    ItemStored,
    pack_seq,
    requests_endpoint,
    unpack_seq,
)

log = logging.getLogger(__name__)

_SILENCE_S: Final = 5.0
"""Time without a message after which nothing is known: there are two a second."""
_ANSWER_S: Final = 5.0
_RETRY_S: Final = 0.5
_MAX_MESSAGE_NBYTES: Final = 8 << 20
_MAX_ITEMS: Final = 1 << 19
"""Items of a server that are remembered; a server with more has some that are unknown here."""


class SeenEvent(Struct):
    """The fields of all types of events that a gateway uses; types of later versions may come."""

    type: str
    name: str = ""
    kind: str = ""
    placement: str = ""


class _Batch(Struct, array_like=True):
    ts: float
    events: list[SeenEvent]


class KnownItems:
    """Items of one server. Pure.

    Invariants:
        - ``_num`` has the number of items with each placement, and no zeros.
        - ``latest`` is the number of the last applied batch; -1: nothing is known.
    """

    def __init__(self) -> None:
        self.latest = -1
        self._placements: dict[tuple[str, str], str] = {}
        self._num: Counter[str] = Counter()

    def has(self, placement: bytes) -> bool:
        """Whether the server has an item with this placement digest."""
        return placement.hex() in self._num

    def clear(self) -> None:
        """Forget everything; the next batch follows none."""
        self.latest = -1
        self._placements.clear()
        self._num.clear()

    def apply(self, seq: int, events: Sequence[SeenEvent]) -> None:
        """Apply the batch with this number."""
        for event in events:
            item = event.name, event.kind
            if event.type == AllItemsCleared.__name__:
                self.clear()
            elif event.type == ItemRemoved.__name__:
                self._remove(item)
            elif event.type == ItemStored.__name__ and event.placement:
                self._remove(item)
                if len(self._placements) < _MAX_ITEMS:
                    self._placements[item] = event.placement
                    self._num[event.placement] += 1
        self.latest = seq

    def _remove(self, item: tuple[str, str]) -> None:
        placement = self._placements.pop(item, None)
        if placement is not None:
            self._num[placement] -= 1
            if not self._num[placement]:
                del self._num[placement]


class ItemFollower:
    """Keeps the items of one server up to date.

    Args:
        host: Name or address of the server's host.
        port: Port of its events; requests go to the next one.
        key: Key that the server asks for; empty for none.
    """

    def __init__(self, host: str, port: int, *, key: str = "") -> None:
        host = f"[{host}]" if ":" in host else host
        self._events = f"tcp://{host}:{port}"
        self._requests = requests_endpoint(self._events)
        self._key = key.encode()
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self.items = KnownItems()

    async def keep_following(self) -> None:
        """Follow the events until cancelled. While it can't, no item is known."""
        is_heard = True
        while True:
            context = zmq.asyncio.Context()
            try:
                await self._follow(context)
            except (TimeoutError, zmq.ZMQError, ValueError) as error:  # msgspec's are `ValueError`s
                if is_heard:
                    why = str(error) or "no message came in time"
                    log.warning("item events of %s can't be followed: %s", self._events, why)
                is_heard = self.items.latest >= 0
                self.items.clear()
            finally:
                context.destroy(linger=0)
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """
        Raises:
            TimeoutError: There was no message for a while, or no answer.
            ValueError: A message is malformed.
        """
        events = self._socket(context, zmq.SUB, self._events)
        requests = self._socket(context, zmq.DEALER, self._requests)
        while True:
            async with asyncio.timeout(_SILENCE_S):
                _, number, batch = await events.recv_multipart()
            seq, expected = unpack_seq(number), self.items.latest + 1
            if seq > expected:
                missed = await self._ask(requests, pack_seq(expected)) if expected else []
                if not missed or missed[0][0] != expected:
                    missed = await self._ask(requests, LIST)
                for each in missed:
                    self.items.apply(*each)
            if seq == self.items.latest + 1:
                self.items.apply(seq, self._decoder.decode(batch).events)

    async def _ask(
        self, requests: zmq.asyncio.Socket, request: bytes
    ) -> list[tuple[int, Sequence[SeenEvent]]]:
        """Return the batches of an answer, with their numbers.

        Raises:
            TimeoutError: It did not come in time.
            ValueError: It is malformed, or the server could not answer.
        """
        found: list[tuple[int, Sequence[SeenEvent]]] = []
        async with asyncio.timeout(_ANSWER_S):
            await requests.send_multipart([b"", request])
            while True:
                _, _, number, batch = await requests.recv_multipart()
                seq = unpack_seq(number)
                if seq == END:
                    return found
                if seq < 0:
                    raise ValueError("the server could not list its items")
                found.append((seq, self._decoder.decode(batch).events))

    def _socket(self, context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        found = context.socket(kind)
        found.setsockopt(zmq.IPV6, 1)
        found.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_NBYTES)
        if self._key:
            found.setsockopt(zmq.PLAIN_USERNAME, USER.encode())
            found.setsockopt(zmq.PLAIN_PASSWORD, self._key)
        if kind == zmq.SUB:
            found.setsockopt(zmq.SUBSCRIBE, TOPIC)
        found.connect(endpoint)
        return found
