"""Web servers of the tests, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def runner_of(answer: Answer) -> web.AppRunner:
    """Return a runner, without a site, of a server that answers all requests in one way."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    return runner


@contextlib.contextmanager
def served(
    start: Callable[[], Awaitable[Sequence[web.AppRunner]]],
) -> Iterator[asyncio.AbstractEventLoop]:
    """Run servers in a thread; yield its event loop.

    Args:
        start: Starts the servers, in the thread.
    """
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        runners = await start()
        started.set()
        await stop.wait()
        for runner in runners:
            await runner.cleanup()

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
