"""Answers of OpenAI Responses that are kept: to read again, and to delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afferent.errors import AfferentError
from afferent.serve.access import Access
from afferent.serve.history import History, not_found
from afferent.serve.http import json_answer, new_id, refusal

_Answering = Callable[[str, str, str], Awaitable[object]]


class KeptResponses:
    """``GET`` and ``DELETE /v1/responses/{id}``."""

    def __init__(self, history: History, access: Access) -> None:
        self._history, self._access = history, access

    def routes(self) -> list[Route]:
        path = "/v1/responses/{id}"
        return [
            Route(path, self._get, methods=["GET"]),
            Route(path, self._delete, methods=["DELETE"]),
        ]

    async def _get(self, request: Request) -> Response:
        """An answer that is kept, as it was given."""
        return await self._handle(request, self._read)

    async def _delete(self, request: Request) -> Response:
        """Forget an answer that is kept, and its conversation."""
        return await self._handle(request, self._forget)

    async def _handle(self, request: Request, answering: _Answering) -> Response:
        request_id = new_id("request-")
        try:
            tenant = self._access.tenant_of(request.headers)
            name = tenant.name if tenant is not None else ""
            found = await answering(request_id, name, request.path_params["id"])
        except AfferentError as error:
            return refusal(error, request_id)
        finally:
            self._history.forget(request_id)
        return json_answer(found, request_id)

    async def _read(self, request_id: str, tenant: str, response_id: str) -> object:
        kept = await self._history.find(request_id, tenant, response_id)
        if kept is None:
            raise not_found(response_id)
        return msgspec.Raw(kept.answer)

    async def _forget(self, request_id: str, tenant: str, response_id: str) -> object:
        if not await self._history.delete(tenant, response_id):
            raise not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}
