"""Process of the live page, separate from all processes that requests pass through.

python -m afferent.operations.live_page.main FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import uvloop

from afferent.operations.live_page.feed import Feed
from afferent.operations.live_page.launch import PageSettings
from afferent.operations.live_page.observing import Observer
from afferent.operations.live_page.site import site
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.runtime.process import ChildProcess

_NICE = 10
"""Low priority: requests come first."""
_MAX_CONNECTIONS = 64
_END_TIMEOUT_S = 2.0
_LIMITS = ConnectionLimits(header_timeout_s=10.0, discard_timeout_s=10.0, write_timeout_s=30.0)


async def _run(child: ChildProcess, settings: PageSettings) -> None:
    listener = socket.socket(fileno=settings.listener_fd)
    feed = Feed(Observer(Path(settings.sockets_folder), name=child.name))
    server = HttpServer(
        site(settings, feed),
        listener,
        _LIMITS,
        refuse=_refusal,
        drain_timeout_s=_END_TIMEOUT_S,
        max_connections=_MAX_CONNECTIONS,
    )
    beating = asyncio.create_task(child.keep_beating())
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    child.report(f"http://{where}:{port}/", ready=True)
    try:
        serving = asyncio.create_task(server.serve())
        await server.is_ending.wait()
        await feed.close()  # else its streams would keep the server from ending
        await serving
    finally:
        beating.cancel()


def _refusal(_: int, why: str) -> bytes:
    return msgspec.json.encode({"error": {"message": why}})


def main() -> None:
    os.nice(_NICE)
    child = ChildProcess.start()
    uvloop.run(_run(child, child.settings(PageSettings)))


if __name__ == "__main__":
    main()
