"""Endpoints for stored answers, common to all APIs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afferent.builtin.apis.api import Api, Asked, Lookup
from afferent.builtin.pipeline.conversations import History
from afferent.errors import AfferentError
from afferent.proxy.auth import Access
from afferent.proxy.responses import json_answer, new_id, refusal


def lookup_route(lookup: Lookup, api: Api, history: History, access: Access) -> Route:
    async def answer(request: Request) -> Response:
        request_id = new_id("request-")
        try:
            tenant = access.tenant_of(request.headers)
            name = tenant.name if tenant is not None else ""
            asked = Asked(request_id, name, request.path_params["id"])
            found = await lookup.answer(history, asked)
        except AfferentError as error:
            return refusal(error, request_id, api)
        finally:
            history.forget(request_id)
        return json_answer(found, request_id)

    answer.__doc__ = lookup.answer.__doc__  # for the OpenAPI document
    return Route(lookup.path, answer, methods=[lookup.method])
