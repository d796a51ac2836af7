"""OpenAPI document of the endpoints: from the routes, and the schemas that check requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import Route

from afferent import __version__
from afferent.builtin.apis.api import Api
from afferent.errors import InvalidRequest, Param, walk
from afferent.proxy.item_lookup import PATH as LOOKUP_PATH
from afferent.proxy.item_lookup import LookupRequest
from afferent.proxy.scoped_endpoint import ScopedEndpoint
from afferent.proxy.statuses import status_of

_REF = "#/components/schemas/{name}"
_OPERATION_TAG = "operation"
_OPEN_TO_ALL = frozenset(("/health", "/metrics", "/openapi.json", "/ready", "/version"))
_TEXTS = frozenset(("/metrics",))
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_SECURITY: list[dict[str, list[str]]] = [{name: []} for name in _SECURITY_SCHEMES]
"""Any of them suffices."""


def document(
    routes: Sequence[Route],
    apis: Mapping[str, Api],
    *,
    streamed: Collection[str],
    model_name: str,
    has_keys: bool,
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args:
        routes: All routes.
        apis: By path; paths below take the same request. Other routes refuse in the format of
            the first API.
        streamed: Paths whose answers may be events.
        model_name: Name for the examples.
        has_keys: Whether clients have to send a key.
    """
    types: list[Any] = [
        *(api.request_type for api in apis.values()),
        *(body for body in map(_body_of, routes) if isinstance(body, type)),
        LookupRequest,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    components |= {_error_name(api): _error_schema(api) for api in apis.values()}
    usual = next(iter(apis))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        below = route.path.removeprefix("/afferent")
        paths_above = [path for path in apis if below.startswith(path)]
        path = max(paths_above, key=len, default=None)
        operation = _operation(route)
        if route.path not in _OPEN_TO_ALL:
            operation["responses"] |= _refusals(apis[path or usual])
        if path is not None and "POST" in (route.methods or set()):
            example = {"model": model_name, **apis[path].example}
            schema = schema_of[apis[path].request_type]
            content = {"application/json": {"schema": schema, "example": example}}
            operation["requestBody"] = {"required": True, "content": content}
        elif route.path == LOOKUP_PATH:
            operation["requestBody"] = {
                "required": True,
                "content": _json(schema_of[LookupRequest]),
            }
        elif (body := _body_of(route)) is not None:
            content = _json(schema_of[body]) if isinstance(body, type) else dict(body)
            operation["requestBody"] = {"required": True, "content": content}
        if route.path in streamed:
            # Tools disagree on a schema of events: the whole text, or each event.
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
        operation["tags"] = [_OPERATION_TAG if path is None else apis[path].name]
        if route.path not in _OPEN_TO_ALL:
            operation["security"] = _SECURITY if has_keys else [{}, *_SECURITY]
        for method in (route.methods or set()) - {"HEAD"}:
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Afferent", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY_SCHEMES},
        "tags": [{"name": name} for name in [*(api.name for api in apis.values()), _OPERATION_TAG]],
    }


def _body_of(route: Route) -> Mapping[str, Any] | type[Struct] | None:
    endpoint = route.endpoint
    return endpoint.body if isinstance(endpoint, ScopedEndpoint) else None


def _operation(route: Route) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").partition("\n")[0]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    content: dict[str, Any] = _json({"type": "object"})
    if route.path in _TEXTS:
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif isinstance(route.endpoint, ScopedEndpoint):
        content = {route.endpoint.answer_type: {}}
    answer = {"description": "The answer", "content": content}
    return {"summary": summary, "parameters": parameters, "responses": {"200": answer}}


def _refusals(api: Api) -> dict[str, Any]:
    """Return an entry for each error status; the format is the API's own."""
    form = _json({"$ref": _REF.format(name=_error_name(api))})
    codes: defaultdict[int, list[str]] = defaultdict(list)
    for cls in walk():
        codes[status_of(cls(""))].append(cls.code)
    return {
        str(status): {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(names)}",
            "content": form,
        }
        for status, names in sorted(codes.items())
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _error_name(api: Api) -> str:
    return f"{api.name}_error"


def _error_schema(api: Api) -> dict[str, Any]:
    example = InvalidRequest("why", param=Param.MESSAGES)
    return _schema_of(api.error_body(example, f"{api.id_prefix}0"))


def _schema_of(value: object) -> dict[str, Any]:
    """Return the schema of an example value."""
    if isinstance(value, Mapping):
        return {"type": "object", "properties": {k: _schema_of(v) for k, v in value.items()}}
    return {"type": ["string", "null"]}
