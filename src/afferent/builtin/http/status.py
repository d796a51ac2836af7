"""Endpoints on a frontend's own state: its model, health and metrics.

None of them waits long for another process: they also report processes that do not answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afferent import __version__
from afferent.builtin.apis.schema import model_not_found
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.engines.metrics import engine_readings
from afferent.errors import (
    AfferentError,
    NotAuthenticated,
)
from afferent.proxy.auth import Access
from afferent.proxy.health import gathered, readiness
from afferent.proxy.metrics import written
from afferent.proxy.responses import json_answer, new_id, refusal
from afferent.proxy.sharing import Shared
from afferent.runtime.heartbeat import Board
from afferent.telemetry import exposition


class Status:
    """Endpoints that run no request."""

    def __init__(
        self,
        pipeline: Pipeline,
        access: Access,
        model_names: tuple[str, ...],
        board: Board | None,
    ) -> None:
        """Create it; ``board`` is the heartbeat table, if there is one."""
        self._pipeline, self._access = pipeline, access
        self._model_names, self._board = model_names, board
        self._readiness, self._page = Shared(self._is_ready), Shared(self._metrics)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/version", self._version),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._render_metrics),
        ]

    async def _models(self, request: Request) -> Response:
        """List the served model, once for each of its names."""
        try:
            self._access.tenant_of(request.headers)
        except NotAuthenticated as error:
            return refusal(error, new_id("models-"))
        return json_answer(
            {"object": "list", "data": [*map(self._describe_model, self._model_names)]}
        )

    async def _model(self, request: Request) -> Response:
        """Describe a served model."""
        name = request.path_params["name"]
        try:
            self._access.tenant_of(request.headers)
        except NotAuthenticated as error:
            return refusal(error, new_id("models-"))
        if name not in self._model_names:
            return refusal(model_not_found(name, self._model_names), new_id("models-"))
        return json_answer(self._describe_model(name))

    def _describe_model(self, name: str) -> dict[str, Any]:
        """Describe the model, as far as the engine is known.

        The fields are those of vLLM (`max_model_len`) and of OpenRouter (`context_length`,
        `architecture`).
        """
        known: dict[str, Any] = {
            "id": name,
            "object": "model",
            "owned_by": "afferent",
            "created": 0,
            "root": self._model_names[0],
            "parent": None,
        }
        if (info := self._pipeline.engine.info) is not None:
            takes = ["text", *self._pipeline.prompts.modalities(info)]
            known |= {
                "max_model_len": info.max_model_len,
                "context_length": info.max_model_len,
                "architecture": {"input_modalities": takes, "output_modalities": ["text"]},
            }
        return known

    async def _version(self, _: Request) -> Response:
        """Return the version of this server."""
        return json_answer({"version": __version__})

    async def _health(self, _: Request) -> Response:
        """Report that this process answers; never waits for another."""
        return json_answer({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        """Report whether a request would be served now."""
        return await self._readiness.get()

    async def _is_ready(self) -> Response:
        has_engine = self._pipeline.engine.info is not None
        return await readiness(self._pipeline.store, self._board, has_engine=has_engine)

    async def _render_metrics(self, _: Request) -> Response:
        """Return the metrics of all processes, the same from every frontend."""
        return await self._page.get()

    async def _metrics(self) -> Response:
        asked = asyncio.create_task(self._pipeline.engine.stats())
        try:
            readings = await gathered(self._pipeline.store)
            if (stats := await asked) is not None:
                readings += engine_readings(stats)
        except AfferentError as error:  # this process's counts alone would look like a reset
            return refusal(error, new_id("metrics-"))
        finally:
            asked.cancel()
        return Response(await written(readings), media_type=exposition.CONTENT_TYPE)
