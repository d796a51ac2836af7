"""Publisher of item events over ZeroMQ: events for all subscribers, and answers to requests.

    PUB      topic, number, batch      each batch, and an empty one each half second in between
    ROUTER   request: number           the batches from this number on, as vLLM replays its events
             request: ``list``         all items in the store
             request: ``find``, names  those of the items that are in the store

A subscriber that misses a number requests the batches from there on, or lists all items. The
numbers show a lost batch within half a second, also the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from afferent.engines.item_events import (
    END,
    LIST,
    NOT_ANSWERED,
    SEQ_NBYTES,
    TOPIC,
    USER,
    AllItemsCleared,
    Event,
    event_of,
    pack_batch,
    pack_seq,
    requests_endpoint,
    stored_event,
    unpack_seq,
)
from afferent.errors import AfferentError, ConfigError, FormatError
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import MAX_NAME_NBYTES
from afferent.store.protocol.results import StoredItem

log = logging.getLogger(__name__)

MAX_BATCH: Final = 256
HEARTBEAT_S: Final = 0.5
_BATCH_S = 0.01
"""Pause between two reads of changes: more changes then share a batch."""
_RETRY_S = 0.1
_MAX_REPLAY_NBYTES = 32 << 20
_MAX_REPLAYED = 10_000
"""Batches in the replay buffer; empty ones fill it in an hour."""
_SENT_AT_ONCE = 64
"""Batches of an answer that are sent without a pause for other tasks."""
_MAX_QUEUED = 1000
"""Batches that wait for a slow subscriber; it loses later ones."""
_ANSWER_TIMEOUT_S = 2.0
"""Longest wait for a client that does not read its answer."""
_FULL_S = 0.005
_MAX_REQUEST_NBYTES = 1 << 20
_MAX_NAMES = 4096


class Publisher:
    """Sockets of the events, and the latest batches for requests.

    Invariants:
        - Numbers of batches are consecutive. A publisher that is started again begins with a
          higher one, so that subscribers notice it as they notice lost batches.
        - The replay buffer has at most `_MAX_REPLAYED` batches with `_MAX_REPLAY_NBYTES`, or one.
    """

    def __init__(self, endpoint: str, *, key: str = "") -> None:
        """Bind both sockets.

        Args:
            endpoint: ``tcp://HOST:PORT`` or ``ipc:///PATH``.
            key: Password that subscribers send, with the user `USER`; empty: none.

        Raises:
            ConfigError: An address can't be bound.
        """
        self._context = zmq.asyncio.Context()
        self._auth: AsyncioAuthenticator | None = None
        if key:
            self._auth = AsyncioAuthenticator(self._context)
            self._auth.start()
            self._auth.configure_plain(passwords={USER: key})
        self._batches: deque[tuple[int, bytes]] = deque()
        self._replay_nbytes = 0
        self._seq = time.time_ns() // 1000
        self._published_s = 0.0
        try:
            self._events = self._bind(zmq.PUB, endpoint, has_key=bool(key))
            self._requests = self._bind(zmq.ROUTER, requests_endpoint(endpoint), has_key=bool(key))
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        self._context.destroy(linger=0)

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish events, in batches of at most `MAX_BATCH`; without events, one empty batch."""
        for start in range(0, max(len(events), 1), MAX_BATCH):
            batch = pack_batch(list(events[start : start + MAX_BATCH]), now_s=time.time())
            self._seq += 1
            self._batches.append((self._seq, batch))
            self._replay_nbytes += len(batch)
            while self._is_buffer_full():
                self._replay_nbytes -= len(self._batches.popleft()[1])
            self._published_s = time.monotonic()
            await self._events.send_multipart([TOPIC, pack_seq(self._seq), batch])

    async def keep_publishing(self) -> None:
        """Publish an empty batch whenever there was none for `HEARTBEAT_S`."""
        while True:
            await asyncio.sleep(max(0.0, self._published_s + HEARTBEAT_S - time.monotonic()))
            if time.monotonic() - self._published_s >= HEARTBEAT_S:
                await self.publish(())

    async def keep_answering(self, store: AsyncDaemonStore) -> None:
        """Answer requests, one after another."""
        while True:
            client, *frames = await self._requests.recv_multipart()
            try:
                await self._answer(store, client, frames)
            except zmq.ZMQError as error:  # it is gone, or reads nothing
                log.info("a client of item events got no answer: %s", error)

    # Inner steps

    def _is_buffer_full(self) -> bool:
        is_large = self._replay_nbytes > _MAX_REPLAY_NBYTES or len(self._batches) > _MAX_REPLAYED
        return is_large and len(self._batches) > 1

    async def _answer(
        self, store: AsyncDaemonStore, client: bytes, frames: Sequence[bytes]
    ) -> None:
        """Send the batches of an answer, and its end."""
        end, number = END, 0
        try:
            async for seq, batch in self._batches_of(store, frames):
                await self._send([client, b"", TOPIC, pack_seq(seq), batch])
                number += 1
                if number % _SENT_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except AfferentError as error:
            log.warning("a request for items was not answered: %s", error.message)
            end = NOT_ANSWERED
        await self._send([client, b"", b"", pack_seq(end), b""])

    async def _send(self, frames: Sequence[bytes]) -> None:
        """Send a message; wait a moment for a client whose queue is full.

        The socket does not wait for one client, as it can take messages for others.

        Raises:
            zmq.ZMQError: The client is gone, or reads nothing.
        """
        until_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while True:
            try:
                await self._requests.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(_FULL_S)
            else:
                return

    def _bind(self, kind: int, endpoint: str, *, has_key: bool) -> zmq.asyncio.Socket:
        found = self._context.socket(kind)
        found.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        found.setsockopt(zmq.IPV6, 1)
        if has_key:
            found.setsockopt(zmq.PLAIN_SERVER, 1)
        if kind == zmq.ROUTER:
            found.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is reported
            found.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_NBYTES)
        before = os.umask(0o077)  # for the file of a Unix socket
        try:
            found.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"--item-events {endpoint}: it can't be bound: {error}") from error
        finally:
            os.umask(before)
        return found

    async def _batches_of(
        self, store: AsyncDaemonStore, frames: Sequence[bytes]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the batches of an answer, with their numbers.

        Those of listed and found items have the number of the latest batch: the events after it
        complete them. A list begins with `AllItemsCleared`.

        Raises:
            FormatError: It is no request.
            Unavailable: The store is gone.
        """
        match frames:
            case [b"", bytes(start)] if len(start) == SEQ_NBYTES:
                first = unpack_seq(start)
                for seq, batch in list(self._batches):
                    if seq >= first:
                        yield seq, batch
            case [b"", word] if word == LIST:
                seq = self._seq
                yield seq, pack_batch([AllItemsCleared()], now_s=time.time())
                async for items in _all_items(store):
                    yield seq, _pack_items(items)
            case [b"", b"find", *names] if len(names) <= _MAX_NAMES:
                seq = self._seq
                for items in _batched(await store.find_items(_parsed(names))):
                    yield seq, _pack_items(items)
            case _:
                raise FormatError(f"a request of {len(frames)} frames is unknown")


async def follow(store: AsyncDaemonStore, publisher: Publisher) -> None:
    """Publish all items, and then their changes, for ever."""
    is_cleared = False
    while True:
        try:
            async for events in _changes(store):
                await publisher.publish(events)
                is_cleared = False
        except AfferentError as error:
            if not is_cleared:  # once for each time that the store is gone
                await publisher.publish([AllItemsCleared()])
            is_cleared = True
            log.info("items can't be followed now: %s", error.code)
        await asyncio.sleep(_RETRY_S)


async def _changes(store: AsyncDaemonStore) -> AsyncIterator[Sequence[Event]]:
    """Yield all items once, and then their changes, until some changes are lost.

    Raises:
        StoreUnavailable: The store daemon is gone.
    """
    page = await store.list_items()
    seq = page.seq
    yield [AllItemsCleared(), *map(stored_event, page.items)]
    while page.after:
        page = await store.list_items(page.after)
        yield [stored_event(item) for item in page.items]
    while (found := await store.watch_items(seq)).is_complete:
        seq = found.seq
        yield [event_of(change) for change in found.changes]
        await asyncio.sleep(_BATCH_S)
    log.warning("changes of items were lost: all items are published again")


async def _all_items(store: AsyncDaemonStore) -> AsyncIterator[list[StoredItem]]:
    """Yield all items, `MAX_BATCH` at a time."""
    after, has_more = 0, True
    while has_more:
        page = await store.list_items(after)
        for items in _batched(page.items):
            yield items
        after, has_more = page.after, page.after > 0


def _batched(items: Sequence[StoredItem]) -> Iterator[list[StoredItem]]:
    return (list(items[at : at + MAX_BATCH]) for at in range(0, len(items), MAX_BATCH))


def _pack_items(items: Sequence[StoredItem]) -> bytes:
    return pack_batch([stored_event(item) for item in items], now_s=time.time())


def _parsed(names: Sequence[bytes]) -> list[bytes]:
    """Return names from hexadecimal digits; others name no item."""
    found = []
    for name in names:
        with contextlib.suppress(ValueError):
            found.append(bytes.fromhex(name.decode("ascii", "replace")))
    return [name for name in found if len(name) <= MAX_NAME_NBYTES]
