"""The HTTP application of a frontend that stands in front of an upstream."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afferent.admit.gate import Gate
from afferent.engine.upstream import Upstream
from afferent.errors import AfferentError
from afferent.serve.apis.api import Api, TokenCount
from afferent.serve.apis.registry import APIS
from afferent.serve.http.auth import Access
from afferent.serve.http.endpoint import AppSettings
from afferent.serve.http.responses import json_answer, new_id, path_of, refusal
from afferent.serve.upstream.exchange import Passage
from afferent.serve.upstream.items import ReferenceStage
from afferent.serve.upstream.metrics import joined
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.metrics import store_readings
from afferent.telemetry import exposition
from afferent.telemetry.registry import REGISTRY


class UpstreamFrontend:
    """All of the upstream's endpoints, and two of our own: ``/ready`` and ``/metrics``."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        upstream: Upstream,
        stage: ReferenceStage,
        settings: AppSettings,
        access: Access,
        *,
        makes_features: bool,
        apis: Sequence[Api] = APIS,
    ) -> None:
        self._store, self._upstream, self._makes_features = store, upstream, makes_features
        counts = [each.api for api in apis for each in api.besides if isinstance(each, TokenCount)]
        known = {api.path: api for api in (*apis, *counts)}
        self._passage = Passage(store, gate, upstream, stage, settings, access, known)
        self._own = {"/ready": self._ready, "/metrics": self._metrics}

    def app(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            request = Request(scope, receive)
            own = self._own.get(path_of(request)) if request.method in ("GET", "HEAD") else None
            if own is None:
                await self._passage(scope, receive, send)
            else:
                await (await own())(scope, receive, send)

        return app

    async def _ready(self) -> Response:
        """Whether a request would be served now."""
        parts = {"store": self._store.is_open, "preprocess": not self._makes_features}
        if parts["store"] and self._makes_features:
            try:
                parts["preprocess"] = (await self._store.stat()).num_workers > 0
            except AfferentError:
                parts["store"] = False
        parts["engine"] = self._upstream.is_ready
        ready = all(parts.values())
        return json_answer({"ready": ready, **parts}, status=200 if ready else 503)

    async def _metrics(self) -> Response:
        """Ours, of all processes, and those of the upstream behind them."""
        try:
            await self._store.push_metrics(REGISTRY.source, REGISTRY.readings())
            readings = [
                *await self._store.read_metrics(),
                *store_readings(await self._store.stat()),
            ]
        except AfferentError as error:  # counts of this process alone would look like a reset
            return refusal(error, new_id("metrics-"))
        page = exposition.render(readings) + joined(await self._upstream.metrics())
        return Response(page, media_type=exposition.CONTENT_TYPE)
