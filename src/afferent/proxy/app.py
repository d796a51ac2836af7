"""HTTP application of a frontend in front of an upstream."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afferent.engines.upstream import Upstream
from afferent.errors import AfferentError, EngineUnavailable
from afferent.proxy import item_lookup
from afferent.proxy.health import gathered, readiness
from afferent.proxy.item_lookup import ItemLookup
from afferent.proxy.metrics import joined, written
from afferent.proxy.responses import json_answer, new_id, path_of, refusal
from afferent.proxy.sharing import Shared
from afferent.proxy.welcome import is_of_files, welcome
from afferent.runtime.heartbeat import Board
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry import exposition


class UpstreamFrontend:
    """All endpoints of the upstream, and some of its own.

    `/health`, `/ready`, `/metrics`, lookups of items, stored files, and a page at `/`, where vLLM
    has nothing.
    """

    def __init__(
        self,
        passage: ASGIApp,
        sockets: ASGIApp,
        store: AsyncDaemonStore,
        upstream: Upstream,
        board: Board | None,
        lookup: ItemLookup,
        *,
        makes_features: bool,
        page_port: int,
        files: ASGIApp | None = None,
    ) -> None:
        """Create the application.

        Args:
            passage: Proxy of requests: a `Passage`.
            sockets: Proxy of WebSockets: a `SocketPassage`.
            board: Heartbeat table of the server's processes, if there is one.
            lookup: Looks up items in the store.
            makes_features: Whether features are made for the model.
            page_port: See `AppSettings.page_port`.
            files: Answers at the paths of files; ``None`` if the upstream does.
        """
        self._files = files
        self._passage, self._sockets = passage, sockets
        self._store, self._upstream = store, upstream
        self._board, self._makes_features = board, makes_features
        self._lookup = lookup
        self._page_port = page_port
        self._own = {
            "/health": self._health,
            "/ready": Shared(self._ready).get,
            "/metrics": Shared(self._metrics).get,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._sockets(scope, receive, send)
        if scope["type"] != "http":
            return None
        request = Request(scope, receive)
        path = path_of(request)
        own = self._own.get(path) if request.method in ("GET", "HEAD") else None
        answer: ASGIApp = self._passage
        if own is not None:
            answer = await own()
        elif path == item_lookup.PATH and request.method == "POST":
            answer = await self._lookup.answer(request)
        elif self._files is not None and is_of_files(path):
            answer = self._files
        elif path == "/" and request.method == "GET":
            answer = welcome(request, page_port=self._page_port)
        return await answer(scope, receive, send)

    async def _health(self) -> Response:
        """Report the upstream's last known health, without waiting for it."""
        if not self._upstream.is_ready:
            return refusal(
                EngineUnavailable("the engine is not ready; try again"), new_id("health-")
            )
        return json_answer({"status": "ok"})

    async def _ready(self) -> Response:
        """Report whether a request would be served now, without sending one that may hang."""
        return await readiness(
            self._store,
            self._board,
            has_engine=self._upstream.is_ready,
            makes_features=self._makes_features,
        )

    async def _metrics(self) -> Response:
        """Return the metrics of all processes, followed by those of the upstream."""
        asked = asyncio.create_task(self._upstream.metrics())
        try:
            readings = await gathered(self._store)
            page = await written(readings) + await joined(await asked)
        except AfferentError as error:  # this process's counts alone would look like a reset
            return refusal(error, new_id("metrics-"))
        finally:
            asked.cancel()
        return Response(page, media_type=exposition.CONTENT_TYPE)
