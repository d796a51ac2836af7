"""Our side of `benchmarks.images`: the stages of a request in a frontend.

All parts are the server's own, from the body reader to `ItemStage`. Only the socket and the prompt
are missing.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from afferent.admission.gate import Gate
from afferent.admission.shares import Share
from afferent.builtin.apis.chat.api import OpenAIChat
from afferent.config import ServeConfig
from afferent.items.item import ItemSettings, Processor
from afferent.items.stage import ItemStage
from afferent.media.families.registry import AnyFamily, fingerprint
from afferent.proxy.body import BodyReader
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.trace import Trace
from afferent.types import Handle, ObjectKind
from benchmarks.pages import photo

WIDTH, HEIGHT = 644, 364
_MODEL = "bench"
_CHUNK_NBYTES = 64 << 10


def chat_body(number: int) -> bytes:
    """Return a client's request with different images."""
    rng, content = np.random.default_rng(0), []
    for _ in range(number):
        file = io.BytesIO()
        photo(rng, WIDTH, HEIGHT).save(file, "JPEG", quality=85)
        url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    body = {"model": _MODEL, "messages": [{"role": "user", "content": content}]}
    return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Made:
    """Features of a body that was complete at ``last_byte_s``; earlier work took ``cut_ms``."""

    request_id: str
    handles: list[Handle]
    last_byte_s: float
    cut_ms: float


class Frontend:
    """The stages of a body in a frontend, up to its features; all items are misses."""

    def __init__(
        self, store: AsyncDaemonStore, config: ServeConfig, folder: Path, family: AnyFamily
    ) -> None:
        self._store, self._limits = store, config.request_limits
        self._gate = Gate(store, timeout_s=config.admission_timeout_s)
        self._api = OpenAIChat()
        self._items = ItemStage(
            store,
            self._gate,
            Processor(family, fingerprint(folder, family)),
            ItemSettings(
                limits=config.request_limits,
                shares=config.shares,
                timeout_s=config.timeout_s(is_upstream=False),
            ),
        )
        self._numbers = itertools.count()

    @classmethod
    async def connect(
        cls, address: str, config: ServeConfig, folder: Path, family: AnyFamily
    ) -> Frontend:
        """Connect to the store; ``folder`` is that of the model, for its fingerprint."""
        store = await AsyncDaemonStore.connect(address, name="bench frontend", writable=True)
        return cls(store, config, folder, family)

    async def features(self, body: bytes) -> Made:
        """Make the features; the request pins them until `clear`."""
        arrival, number = _Arrival(body), next(self._numbers)
        request_id = f"images-{number}"
        reader = BodyReader(self._store, self._gate, request_id, self._limits, self._api.media_keys)
        received = await reader.read(arrival.request)
        call = self._api.parse(received, request_id=request_id, model=_MODEL)
        # A new tenant each time, so that nothing is a hit.
        request = msgspec.structs.replace(call.generate, share=Share(str(number)))
        self._items.check(request.items)
        trace = Trace(request_id, "bench")
        sources = await self._items.read(request.items, trace)
        with sources.awaited():
            ready = await self._items.prepare(request_id, sources, trace)
        handles = [item.handle for item in ready]
        return Made(request_id, handles, arrival.last_byte_s, arrival.cut_ms)

    async def clear(self, made: Made) -> None:
        await self._store.release(made.request_id)
        for kind in (ObjectKind.RAW, ObjectKind.FEATURES):
            await self._store.evict(kind)

    async def close(self) -> None:
        await self._items.close()
        await self._store.close()


class _Arrival:
    """A body that arrives in chunks, with the time of its arrival."""

    def __init__(self, body: bytes) -> None:
        self._chunks = [
            body[start : start + _CHUNK_NBYTES] for start in range(0, len(body), _CHUNK_NBYTES)
        ]
        self._messages = self._arrive()
        headers = [(b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "headers": headers}
        self.request = Request(scope, self._receive)
        self._first_byte_s = self.last_byte_s = 0.0

    @property
    def cut_ms(self) -> float:
        return (self.last_byte_s - self._first_byte_s) * 1e3

    async def _receive(self) -> dict[str, Any]:
        return await anext(self._messages)

    async def _arrive(self) -> AsyncIterator[dict[str, Any]]:
        self._first_byte_s = time.perf_counter()
        for number, chunk in enumerate(self._chunks, start=1):
            is_last = number == len(self._chunks)
            if is_last:
                self.last_byte_s = time.perf_counter()
            yield {"type": "http.request", "body": chunk, "more_body": not is_last}
