"""The process of the live page, apart from all that requests go through.

python -m afferent.live.main FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import uvicorn
import uvloop

from afferent.live.feed import Feed
from afferent.live.launch import PageSettings
from afferent.live.observing import Observer
from afferent.live.site import site
from afferent.runtime.process import ChildProcess
from afferent.serve.http.calm import CalmServer

_NICE = 10
"""Requests come first."""
_MAX_CONNECTIONS = 64
_END_TIMEOUT_S = 2


async def _run(child: ChildProcess, settings: PageSettings) -> None:
    listener = socket.socket(fileno=settings.listener_fd)
    feed = Feed(Observer(Path(settings.sockets_folder), name=child.name))
    config = uvicorn.Config(
        site(settings, feed),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_END_TIMEOUT_S,
    )
    beating = asyncio.create_task(child.keep_beating())
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    child.report(f"http://{where}:{port}/", ready=True)
    try:
        await _Server(config, feed).serve(sockets=[listener])
    finally:
        beating.cancel()


class _Server(CalmServer):
    """Nobody's stream of views keeps it from ending."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._feed.close()
        await super().shutdown(sockets)


def main() -> None:
    os.nice(_NICE)
    child = ChildProcess.start()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what it warns of is what clients send
    uvloop.run(_run(child, child.settings(PageSettings)))


if __name__ == "__main__":
    main()
