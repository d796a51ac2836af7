"""The HTTP application of a frontend."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afferent.admit.gate import Gate
from afferent.errors import InvalidRequest
from afferent.metrics import Metrics
from afferent.serve.access import Access
from afferent.serve.api import Api
from afferent.serve.apis import APIS, TOKEN_COUNTS
from afferent.serve.endpoint import AppSettings, Endpoint
from afferent.serve.history import History
from afferent.serve.http import json_answer, new_id, path_of, refusal
from afferent.serve.kept_responses import KeptResponses
from afferent.serve.openapi import document
from afferent.serve.pipeline import Pipeline
from afferent.serve.status import Status

_WORDS = {404: "there is no such endpoint", 405: "the endpoint has no such method"}


class Frontend:
    """The endpoints, over one `Pipeline`."""

    def __init__(
        self,
        pipeline: Pipeline,
        gate: Gate,
        metrics: Metrics,
        settings: AppSettings,
        *,
        apis: Mapping[str, Api] = APIS,
        counts: Mapping[str, Api] = TOKEN_COUNTS,
        access: Access | None = None,
    ) -> None:
        """
        Args:
            apis: By the path that each is asked at.
            counts: Those that are asked for the length of a prompt, likewise.
            access: Says whose request it is; without it, nobody needs a key.
        """
        self._apis = {**apis, **counts}
        access = access or Access(pipeline.store)
        history = History(pipeline.store, metrics)
        endpoints = {
            path: Endpoint(api, pipeline, gate, metrics, settings, access, history)
            for path, api in self._apis.items()
        }
        kept = KeptResponses(history, access)
        status = Status(pipeline, metrics, access, settings.model_name)
        self._routes = [
            *[Route(path, endpoints[path].answer, methods=["POST"]) for path in apis],
            *[Route(path, endpoints[path].count, methods=["POST"]) for path in counts],
            *[Route(f"{path}/render", endpoints[path].render, methods=["POST"]) for path in apis],
            *kept.routes(),
            *status.routes(),
            Route("/openapi.json", self._describe),
        ]
        self._document = document(self._routes, self._apis)

    def app(self) -> Starlette:
        return Starlette(routes=self._routes, exception_handlers={HTTPException: self._refuse})

    async def _describe(self, _: Request) -> Response:
        """This document."""
        return json_answer(self._document)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """What the router refuses, in the same form as every other refusal."""
        status, headers = 500, None
        if isinstance(error, HTTPException):
            status, headers = error.status_code, error.headers
        refused = InvalidRequest(_WORDS.get(status, "the request was refused"))
        api = self._apis.get(path_of(request))
        request_id = new_id(api.id_prefix if api else "request-")
        answer = refusal(refused, request_id, api, status=status)
        answer.headers.update(headers or {})
        return answer
