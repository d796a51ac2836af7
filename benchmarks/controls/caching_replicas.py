"""Servers in place of replicas, each with a cache of images and with item events.

python -m benchmarks.controls.caching_replicas PORT EVENTS_PORT HOST...

A server has the `CAPACITY` images that it used last. Its answer says whether it had the first image
of the request; a miss takes twice as long as a hit. ``POST /forget`` is a restart: it has nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, cast

import uvloop
from aiohttp import web
from blake3 import blake3

from afferent.engines.item_events import AllItemsCleared, Event, ItemRemoved, stored_event
from afferent.keys import placement_digest
from afferent.operations.item_events.publisher import Publisher
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.results import ItemPage, StoredItem
from afferent.types import MiB, Modality, ObjectKind

CAPACITY: Final = 60
ITEM_NBYTES: Final = MiB
HIT_S: Final = 0.1
MISS_S: Final = 0.2


class _Replica:
    """One server. It is a store of items, too, as far as its publisher uses one."""

    def __init__(self, index: int, events: str) -> None:
        self._index = index
        self._items: OrderedDict[bytes, StoredItem] = OrderedDict()
        self._publisher = Publisher(events)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * MiB)
        app.cleanup_ctx.append(self._publishing)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/forget", self._forget)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/{path:.*}", self._health)
        return app

    async def list_items(self, after: int = 0) -> ItemPage:
        return ItemPage(0, list(self._items.values()), 0)

    async def _publishing(self, _: web.Application) -> AsyncIterator[None]:
        store = cast(AsyncDaemonStore, self)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._publisher.keep_publishing()),
                group.create_task(self._publisher.keep_answering(store)),
            ]
            yield
            for task in tasks:
                task.cancel()
        self._publisher.close()

    async def _answer(self, request: web.Request) -> web.Response:
        file = _image(await request.json())
        is_hit = await self._use(file) if file is not None else False
        await asyncio.sleep(HIT_S if is_hit else MISS_S)
        return web.json_response({"choices": [], "replica": self._index, "hit": is_hit})

    async def _use(self, file: bytes) -> bool:
        name = blake3(file).digest()
        if name in self._items:
            self._items.move_to_end(name)
            return True
        digest = placement_digest(Modality.IMAGE, file)
        stored = StoredItem(name, ObjectKind.FEATURES, ITEM_NBYTES, Modality.IMAGE, digest, "")
        self._items[name] = stored
        events: list[Event] = [stored_event(stored)]
        if len(self._items) > CAPACITY:
            gone, _ = self._items.popitem(last=False)
            events.append(ItemRemoved(gone.hex(), ObjectKind.FEATURES))
        await self._publisher.publish(events)
        return False

    async def _forget(self, _: web.Request) -> web.Response:
        self._items.clear()
        await self._publisher.publish([AllItemsCleared()])
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()


def _image(body: Any) -> bytes | None:
    """Return the first image of a request."""
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image_url":
                return base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return None


async def _serve(port: int, events_port: int, hosts: Sequence[str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for index, host in enumerate(hosts):
            app = _Replica(index, f"tcp://{host}:{events_port}").app()
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, port).start()
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
