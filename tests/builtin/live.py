"""A frontend in this process with a real socket, and OpenAI's client for live sessions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from starlette.types import ASGIApp

from afferent.builtin.apis.realtime.events import REALTIME
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.proxy.responses import refusal_body
from tests.builtin.frontends import application
from tests.server import Server

LIMITS = ConnectionLimits(header_timeout_s=30.0, discard_timeout_s=30.0, write_timeout_s=30.0)
KEY = "none"


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application on a port that the system chooses; yield its URL."""
    # With its protocol named, asyncio sends small messages at once.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    server = HttpServer(
        *(app, listener, LIMITS),
        refuse=refusal_body,
        drain_timeout_s=1.0,
        websocket_paths=frozenset({REALTIME.path}),
        single_fields=frozenset(),
    )
    task = asyncio.create_task(server.serve())
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end_now()
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def live_server(address: str, **options: Any) -> AsyncIterator[str]:
    """Serve a frontend with the options of `application`; yield its URL."""
    async with application(address, **options) as app, serving(app) as url:
        yield url


@contextlib.asynccontextmanager
async def connected(
    url: str, *, session_id: str | None = None, key: str = KEY, model: str = "shapes"
) -> AsyncIterator[Live]:
    """Open a session with OpenAI's client."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    query = {"session_id": session_id} if session_id is not None else {}
    async with client, client.realtime.connect(model=model, extra_query=query) as connection:
        live = Live(connection)
        live.created = await live.until("session.created")
        yield live


class Live:
    """A client's side of a session."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self.connection = connection
        self.created: Any = None
        self.events: list[Any] = []

    @property
    def session_id(self) -> str:
        found: str = self.created.session.id
        return found

    def frontend_of(self, server: Server) -> int:
        """Return the process that serves this session."""
        port = self.connection._connection.local_address[1]
        (pid,) = [
            process.pid
            for process in server.find("afferent.builtin.frontend")
            if any(
                each.raddr and each.raddr.port == port for each in process.net_connections("tcp")
            )
        ]
        return pid

    async def send(self, **event: Any) -> None:
        await self.connection.send(event)  # type: ignore[arg-type]

    async def send_text(self, text: str | bytes) -> None:
        """Send a message as it is."""
        await self.connection._connection.send(text)

    async def until(self, kind: str) -> Any:
        """Return the next event of a kind; all events until then are in ``events``."""
        async with asyncio.timeout(30):
            while True:
                event = await self.connection.recv()
                self.events.append(event)
                if event.type == "error" and kind == "response.done":
                    raise AssertionError(event)
                if event.type == kind:
                    return event

    async def add(self, *parts: dict[str, Any], role: str = "user", **event: Any) -> Any:
        """Add an item; return it."""
        item = {"type": "message", "role": role, "content": list(parts), **event.pop("item", {})}
        await self.send(type="conversation.item.create", item=item, **event)
        return (await self.until("conversation.item.done")).item

    async def answer(self, **response: Any) -> Any:
        """Request an answer; return the response."""
        await self.send(type="response.create", response=response)
        return (await self.until("response.done")).response

    async def refused(self, **event: Any) -> Any:
        """Send an event; return the error that answers it."""
        await self.send(event_id="mine", **event)
        error = (await self.until("error")).error
        assert error.event_id == "mine"
        return error


def text_part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def image_part(data: bytes) -> dict[str, str]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "input_image", "image_url": url}
