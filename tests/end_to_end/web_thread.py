"""Web servers of the tests, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Listening:
    """A server, and the socket at which it accepts connections."""

    runner: web.AppRunner
    sock: socket.socket


async def listening(
    answer: Answer, sock: socket.socket, *, tls: ssl.SSLContext | None = None
) -> Listening:
    """Start a server that answers all requests in one way, at a bound socket."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, sock, ssl_context=tls).start()
    return Listening(runner, sock)


@contextlib.contextmanager
def served(
    start: Callable[[], Awaitable[Sequence[Listening]]],
) -> Iterator[asyncio.AbstractEventLoop]:
    """Run servers in a thread; yield its event loop.

    Args:
        start: Starts the servers, in the thread.
    """
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        servers = await start()
        started.set()
        await stop.wait()
        # asyncio never closes a connection that it has accepted when its server closes before the
        # connection has a transport, which takes some rounds of the loop.
        for server in servers:
            loop.remove_reader(server.sock)
        for _ in range(3):
            await asyncio.sleep(0)
        for server in servers:
            await server.runner.cleanup()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        yield loop
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
