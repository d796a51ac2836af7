"""The two sides of `afferent.bench.images`: a frontend with all of its parts, and the heap."""

from __future__ import annotations

import base64
import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pybase64
from starlette.requests import Request

from afferent import keys
from afferent.admit.gate import Gate
from afferent.bench.pages import photo
from afferent.config import RequestLimits
from afferent.errors import InternalError
from afferent.ingest.digest import Digester
from afferent.ingest.probe import probe_image
from afferent.ingest.raw import RawMedia
from afferent.preprocess.decode.image import decode_image
from afferent.preprocess.jobs import InputRange, MakeFeatures
from afferent.preprocess.registry import AnyFamily, plan_for_sure
from afferent.serve.body import BodyReader
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore
from afferent.types import Handle, ObjectKind, encode

WIDTH, HEIGHT = 644, 364
_REQUEST = "images"
_CHUNK_NBYTES = 64 << 10
_NUM_DIGEST_THREADS = _NUM_DECODE_THREADS = 2
_TIMEOUT_S = 60.0


def chat_body(number: int) -> bytes:
    """A request with so many different pictures, as a client sends it."""
    rng, content = np.random.default_rng(0), []
    for _ in range(number):
        file = io.BytesIO()
        photo(rng, WIDTH, HEIGHT).save(file, "JPEG", quality=85)
        url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


@dataclass(frozen=True, slots=True)
class Made:
    """Features of a body. ``last_byte_s`` is when it was complete, on `time.perf_counter`;
    ``cut_ms`` is what had been worked on it before.
    """

    handles: list[Handle]
    last_byte_s: float
    cut_ms: float


class Frontend:
    """A body's way through a frontend, until its features are made; all of them are missing."""

    def __init__(self, store: AsyncDaemonStore, family: AnyFamily) -> None:
        self._store, self._family = store, family
        self._limits = RequestLimits()
        self._gate = Gate(store, timeout_s=_TIMEOUT_S)
        self._digester = Digester(_NUM_DIGEST_THREADS)
        self._rounds = itertools.count()

    @classmethod
    async def connect(cls, address: str, family: AnyFamily) -> Frontend:
        store = await AsyncDaemonStore.connect(address, name="bench frontend", writable=True)
        return cls(store, family)

    async def features(self, body: bytes) -> Made:
        """The request holds them until `clear`."""
        arrival = _Arrival(body)
        reader = BodyReader(self._store, self._gate, _REQUEST, self._limits)
        received = await reader.read(arrival.request)
        media = [received.media[url] for url in _urls(received.json)]
        in_arena = {raw.handle for raw in media if raw.handle is not None}
        if in_arena:
            to_seal = [m.SealItem(handle, handle.nbytes) for handle in in_arena]
            await self._store.seal(_REQUEST, to_seal)
        handles = await self._make([await self._in_arena(item) for item in media])
        return Made(handles, arrival.last_byte_s, arrival.cut_ms)

    async def clear(self) -> None:
        await self._store.release(_REQUEST)
        for kind in (ObjectKind.RAW, ObjectKind.FEATURES):
            await self._store.evict(kind)

    async def close(self) -> None:
        self._digester.close()
        await self._store.close()

    async def _in_arena(self, raw: RawMedia) -> tuple[Handle, InputRange]:
        """Where an item's file is; what came in a small body is on the heap until now."""
        if raw.handle is not None:
            return raw.handle, InputRange(raw.start, raw.nbytes)
        item = m.CreateItem(ObjectKind.RAW, raw.nbytes)
        (handle,) = await self._store.create(_REQUEST, [item])
        self._store.block(handle)[:] = raw.data or b""
        (sealed,) = await self._store.seal(_REQUEST, [m.SealItem(handle, raw.nbytes)])
        return sealed, InputRange(0, raw.nbytes)

    async def _make(self, files: Sequence[tuple[Handle, InputRange]]) -> list[Handle]:
        views = [
            self._store.block(handle)[file.start : file.start + file.nbytes]
            for handle, file in files
        ]
        headers = [probe_image(view, self._limits) for view in views]
        digests = await self._digester.digest_all(views)
        tenant = str(next(self._rounds))  # a new one each time, so that all are missing
        wanted = [
            m.AcquireItem(
                keys.features_key(tenant=tenant, fingerprint=b"bench", options=b"", media=digest),
                ObjectKind.FEATURES,
                plan_for_sure(self._family, header).nbytes,
                m.JobSpec([handle], encode(MakeFeatures(header, file))),
            )
            for (handle, file), header, digest in zip(files, headers, digests, strict=True)
        ]
        room = [m.ReserveItem(item.kind, item.nbytes) for item in wanted]
        await self._gate.admit(_REQUEST, room)
        await self._store.acquire(_REQUEST, wanted)
        outcomes = await self._store.wait(_REQUEST, [item.key for item in wanted])
        handles = [outcome.handle for outcome in outcomes if outcome.handle is not None]
        if len(handles) < len(wanted):
            raise InternalError("a picture of the benchmark was refused")
        return handles


class _Arrival:
    """A body that arrives in chunks, and when it did."""

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


class Control:
    """Pictures on the heap, as in servers whose API process decodes on a pool of threads (vLLM's
    media connector does), with the decoders and the processor of the other side.
    """

    def __init__(self, family: AnyFamily) -> None:
        self._family, self._limits = family, RequestLimits()
        self._threads = ThreadPoolExecutor(_NUM_DECODE_THREADS)

    def features(self, body: bytes) -> list[dict[str, Any]]:
        """Of each picture of a body, in order."""
        return list(self._threads.map(self._one, _urls(body)))

    def close(self) -> None:
        self._threads.shutdown()

    def _one(self, url: str) -> dict[str, Any]:
        data = memoryview(pybase64.b64decode(url.partition(",")[2]))
        header = probe_image(data, self._limits)
        picture = decode_image(data, header, self._limits)
        specs = plan_for_sure(self._family, header).specs
        features = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._family.process(picture, features)
        return features


def _urls(body: bytes) -> list[str]:
    (message,) = msgspec.json.decode(body)["messages"]
    return [part["image_url"]["url"] for part in message["content"]]
