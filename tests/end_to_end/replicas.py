"""Servers with OpenAI's chat completions in place of engines: all in one thread.

Each answers with its name and what it got: the format, size and first pixel of each image. A test
may make it fail in several ways.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from PIL import Image

from tests.end_to_end.web_thread import Listening, listening, served

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Got:
    """One request as it was received."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(eq=False, slots=True)
class Replica:
    """One server, and its behaviour."""

    name: str
    url: str = ""
    got: list[Got] = field(default_factory=list)
    status: int = 200
    """Status of its answers."""
    health: int = 200
    """Status of its health check."""
    is_frozen: bool = False
    """Whether it accepts requests, and never answers."""
    hangs_up: bool = False
    """Whether it closes the connection in place of an answer."""
    hangs_up_early: bool = False
    """Whether it closes the connection in the middle of a request."""
    answers_early: bool = False
    """Whether it refuses a request in its middle."""
    arrived_nbytes: int = 0
    """Bytes of bodies that have arrived, also of those that broke off."""
    num_arriving: int = 0
    """Requests whose body has not arrived yet."""
    breaks_off: bool = False
    """Whether it closes the connection in the middle of an answer."""
    fields: dict[str, str] = field(default_factory=dict)
    """Headers of its answers."""
    items: dict[str, Any] = field(default_factory=dict)
    """Items by their names, as far as it has got and not lost them."""
    unknown_name: int = 409
    """Status of its answers to names that it does not know."""
    models: tuple[str, ...] = ()
    """Models that it lists."""
    num_checks: int = 0
    """Times that its health or its models were asked for."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()
        self.may_end.set()

    def reset(self) -> None:
        self.got.clear()
        self.items.clear()
        self.fields = {}
        self.unknown_name = 409
        self.status = self.health = 200
        self.is_frozen = self.hangs_up = self.breaks_off = False
        self.hangs_up_early = self.answers_early = False
        self.arrived_nbytes = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.is_frozen:
            await asyncio.sleep(3600)
        self.num_checks += request.path in ("/health", "/v1/models")
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/v1/models" and self.models:
            listed = [{"id": each, "object": "model"} for each in self.models]
            return web.json_response({"object": "list", "data": listed})
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await self._arrived(request)
        if body is None:
            return web.json_response({"error": {"message": "too large"}}, status=413)
        got = Got(request.path, headers, body)
        self.got.append(got)
        self.num_running += 1
        try:
            return await self._answer(request, got)
        finally:
            self.num_running -= 1

    async def _arrived(self, request: web.Request) -> bytes | None:
        """Return the whole body; ``None`` if this server has refused it in its middle."""
        body = bytearray()
        self.num_arriving += 1
        try:
            async for chunk in request.content.iter_any():
                body += chunk
                self.arrived_nbytes += len(chunk)
                if self.hangs_up_early and request.transport is not None:
                    request.transport.abort()
                if self.answers_early:
                    return None
            return bytes(body)
        finally:
            self.num_arriving -= 1

    def _resolve(self, body: Any) -> bool:
        """Put known items in place of names that stand alone; return whether all are known."""
        for part in parts_of(body):
            name, kind = part.get("uuid"), part["type"]
            if part[kind] is None and name not in self.items:
                return False
            if name is not None:
                part[kind] = self.items.setdefault(name, part[kind])
        return True

    async def _answer(self, request: web.Request, got: Got) -> web.StreamResponse:
        if self.hangs_up:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.status != 200:
            return web.json_response({"error": {"message": self.name}}, status=self.status)
        await self.may_answer.wait()
        body = got.json if got.body else {}
        if not self._resolve(body):
            return web.json_response({"error": {"message": "unknown"}}, status=self.unknown_name)
        said = {"replica": self.name, "media": [seen(part) for part in parts_of(body)]}
        if not body.get("stream"):
            whole = {"id": "x", "choices": [said_as_choice(said)]}
            return web.json_response(whole, headers=self.fields)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: " + json.dumps(said).encode() + b"\n\n")
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
            return answer
        await self.may_end.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer


def said_as_choice(said: Any) -> dict[str, Any]:
    return {"index": 0, "message": {"role": "assistant", "content": json.dumps(said)}}


def parts_of(body: Any) -> list[Any]:
    contents = [message.get("content") for message in body.get("messages", [])]
    return [
        part
        for content in contents
        if isinstance(content, list)
        for part in content
        if part["type"] in ("image_url", "input_audio", "video_url")
    ]


def seen(part: Any) -> Any:
    """Return what a part has: of an image its format, size and first pixel."""
    if part["type"] == "input_audio":
        return {"format": part["input_audio"]["format"], "nbytes": len(_data(part["input_audio"]))}
    head, _, text = part[part["type"]]["url"].partition(",")
    data = base64.b64decode(text, validate=True)
    if part["type"] != "image_url":
        return {"head": head, "nbytes": len(data)}
    with Image.open(io.BytesIO(data)) as image:
        pixel = image.convert("RGB").getpixel((0, 0))
        return {"head": head, "format": image.format, "size": image.size, "pixel": pixel}


def _data(audio: Any) -> bytes:
    return base64.b64decode(audio["data"], validate=True)


class Replicas:
    """Servers in one thread, which ends with the context."""

    def __init__(self, number: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.all = [Replica(f"replica-{index}") for index in range(number)]
        self._tls = tls

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.all]

    def reset(self) -> None:
        for replica in self.all:
            replica.reset()

    def hold(
        self,
        *,
        is_held: bool,
        replicas: Sequence[Replica] | None = None,
        in_the_middle: bool = False,
    ) -> None:
        """Make servers wait before each answer, or in its middle; or let them answer."""

        def change() -> None:
            for replica in self.all if replicas is None else replicas:
                if not is_held:
                    replica.may_answer.set()
                    replica.may_end.set()
                else:
                    (replica.may_end if in_the_middle else replica.may_answer).clear()

        self._loop.call_soon_threadsafe(change)

    @contextlib.contextmanager
    def running(self) -> Iterator[Replicas]:
        with served(self._start_all) as self._loop:
            yield self

    async def _start_all(self) -> list[Listening]:
        return [await self._start(replica) for replica in self.all]

    async def _start(self, replica: Replica) -> Listening:
        sock = socket.create_server(("127.0.0.1", 0))
        scheme = "http" if self._tls is None else "https"
        replica.url = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
        return await listening(replica.answer, sock, tls=self._tls)
