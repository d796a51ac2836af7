"""A server in place of vLLM: it reads features in the arena as vLLM's plugin does.

It is no engine; tests with a real vLLM (`tests/vllm`) cover what a model computes from features.
This stand-in makes each behaviour of an upstream easy to produce, to test the frontend against it.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from aiohttp import web

from afferent import keys
from afferent.engines.ahead import Encoder, announce
from afferent.engines.place import Place
from afferent.engines.references import FeaturesReference, RawReference
from afferent.engines.vllm.plugin.arena import Arena, Gone
from afferent.store.client.item_cache import ItemCache
from afferent.types import ContentKey
from tests.end_to_end.web_thread import Listening, listening, served

WIDTH = 64
WEIGHTS = keys.frame(b"a stand-in's weights")
ENCODER = Encoder(WEIGHTS, WIDTH * 8)
COMMIT = '{"type": "input_audio_buffer.commit", "final": true}'
_REFERENCE = re.compile(r"[\"\n](afferent:[\w=-]+)[\"\r]")
"""Reference in JSON, or as a file in a form."""


@dataclass(slots=True)
class Heard:
    """One request as it was received."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    references: list[FeaturesReference | RawReference] = field(default_factory=list)


class StandIn:
    """Listens on a unix socket; each answer describes what was found in the arena."""

    def __init__(self, folder: Path, store_path: Path, *, encodes_s: float | None = None) -> None:
        """Create a server; with ``encodes_s``, it has an encoder.

        Args:
            encodes_s: The encoder's time for an item; embeddings are stored, and reused.
        """
        self._encodes_s = encodes_s
        self._name = "stand-in" if encodes_s is None else "worker"  # a worker may write
        self.num_encoded = self.num_found = 0
        self.url = f"unix:{folder / 'vllm.sock'}"
        self._path, self._store_path = folder / "vllm.sock", store_path
        self.heard: list[Heard] = []
        self.num_aborted = 0
        self.health_s = 0.0
        self.tells_gate = True
        """Whether it reports the references that it has read, as vLLM's plugin does."""
        self.is_well = True
        self.closed_with: list[int | None] = []
        self.before_reading: Callable[[], Awaitable[None]] | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self._arena: Arena | None = None

    def __enter__(self) -> Self:
        self._served = served(self._start)
        self._served.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._served.__exit__(kind, error, trace)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    async def _start(self) -> list[Listening]:
        self._path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(self._path))
        return [await listening(self._answer, sock)]

    def arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(Place(str(self._store_path)), name=self._name)
        return self._arena

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            await asyncio.sleep(self.health_s)
            return web.Response(status=200 if self.is_well else 503)
        if request.path == "/metrics":
            return web.Response(text="vllm:num_requests_running 0.0\n")
        if request.path == "/v1/realtime":
            return await self._talk(request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        heard = Heard(request.method, request.raw_path, headers, await request.read())
        self.heard.append(heard)
        try:
            return await self._answer_to(request, heard)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise

    async def _talk(self, request: web.Request) -> web.WebSocketResponse:
        """Send back each message twice; close on "go", and note the code of the close.

        The end of the audio is answered as by vLLM.
        """
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.heard.append(Heard(request.method, request.raw_path, headers, b""))
        talk = web.WebSocketResponse(protocols=("b", "c"))
        await talk.prepare(request)
        async for message in talk:
            if message.data == "go":
                await talk.close(code=4321)
            elif message.data == COMMIT:
                await talk.send_json({"type": "transcription.done", "text": "hello"})
            elif message.type is web.WSMsgType.TEXT:
                await talk.send_str(message.data * 2)
            else:
                await talk.send_bytes(message.data * 2)
        self.closed_with.append(talk.close_code)
        return talk

    async def _answer_to(self, request: web.Request, heard: Heard) -> web.StreamResponse:
        if request.path == "/tea":
            return web.Response(status=418, body=b"\x00teapot", headers={"x-kind": "green"})
        if request.path == "/moved":  # as FastAPI does: with the host of the request
            return web.Response(
                status=307, headers={"Location": f"http://{request.host}{request.query['to']}"}
            )
        if request.path == "/broken":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if request.path == "/tokenize" and b"afferent:" in heard.body and b"repeat" in heard.body:
            return web.Response(status=400, body=b"wrong: " + heard.body[:150] + b"...[truncated]")
        has_json = "json" in request.headers.get("content-type", "")
        if not has_json and b"afferent:" not in heard.body:
            return web.json_response({"nbytes": len(heard.body)})
        if self.before_reading is not None:
            await self.before_reading()
        urls = _REFERENCE.findall(heard.body.decode())
        heard.references = [self.arena().verify(url) for url in urls]
        said = [await asyncio.to_thread(self._read, each) for each in heard.references]
        if self.tells_gate:
            raw = [each.of for each in heard.references if isinstance(each, RawReference)]
            self.arena().leave(raw)
        if not has_json or not json.loads(heard.body).get("stream"):
            await asyncio.to_thread(self.may_end.wait, 60)
            if request.path.endswith("/rerank"):  # as vLLM does: with the documents
                documents = json.loads(heard.body)["documents"]
                return web.json_response({"said": said, "results": documents})
            return web.json_response({"said": said})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for word in said or ["nothing"]:
            await answer.write(b"data: " + json.dumps(word).encode() + b"\n\n")
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _read(self, reference: FeaturesReference | RawReference) -> Any:
        is_made = isinstance(reference, FeaturesReference)
        self.arena().admit(reference.of, is_processed=is_made and self.tells_gate)
        match reference:
            case FeaturesReference(key=key, handle=handle):
                with self.arena().request("read") as request:
                    if self.arena().pin(request, [(key, handle)]) == [False]:
                        return "nothing"
                    try:
                        tree = self.arena().view(handle)
                        name = next(name for name in tree if name.startswith("pixel_values"))
                        total = int(tree[name].long().sum())
                        del tree
                    except Gone:
                        return "nothing"
                said = {"sum": total, "rows": reference.num_embeds}
                if self._encodes_s is not None:
                    said["embeddings"] = self._embed(reference, total, self._encodes_s)
                return said
            case RawReference(_, handle, start, nbytes):
                return {"bytes": len(self.arena().raw(handle, start, nbytes))}

    def announce(self) -> None:
        """Announce the encoder, as a worker does after it has loaded its weights and repeatedly."""
        announce(self.arena().store, ENCODER, is_first=False)

    def _embed(self, reference: FeaturesReference, total: int, takes_s: float) -> int:
        """Return the sum of an item's embeddings, from the store or newly encoded."""
        key, cache = ContentKey(reference.key), ItemCache(self.arena().store, weights=WEIGHTS)
        with self.arena().request("embed") as request:
            if found := cache.get_embeddings(request, [key]):
                self.num_found += 1
                return int(found[key]["rows"].sum())  # type: ignore[call-overload]
            time.sleep(takes_s)  # simulates an encoder
            self.num_encoded += 1
            rows = np.zeros((reference.num_embeds, WIDTH), np.int64)
            rows[0, 0] = total
            made_us = {key: round(takes_s * 1e6)}
            cache.set_embeddings(request, {key: {"rows": rows}}, made_us=made_us)
            return total
