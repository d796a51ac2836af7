"""HTTP responses."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from afferent.errors import AfferentError, InvalidRequest
from afferent.proxy import dialects
from afferent.proxy.dialects import ErrorFormat
from afferent.proxy.statuses import headers_of, status_of

IGNORED: Final = "x-ignored-parameters"
_MAX_SHOWN: Final = 16


def json_answer(value: object, request_id: str | None = None, *, status: int = 200) -> Response:
    headers = id_headers(request_id) if request_id else None
    body = msgspec.json.encode(value)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def id_headers(request_id: str) -> dict[str, str]:
    """Return the request id in the headers of OpenAI's and of Anthropic's clients."""
    return {"x-request-id": request_id, "request-id": request_id}


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return a header with the unknown parameters; names unfit for a header are left out."""
    shown = [name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)]
    return {IGNORED: ", ".join(shown[:_MAX_SHOWN])} if shown else {}


def refusal(
    error: AfferentError,
    request_id: str,
    api: ErrorFormat = dialects.NONE,
    *,
    status: int | None = None,
) -> Response:
    """Return the error in the format of an API.

    Args:
        status: Overrides the error's own status.
    """
    answer = json_answer(
        api.error_body(error, request_id), request_id, status=status or status_of(error)
    )
    answer.headers.update(headers_of(error))
    return answer


def refusal_body(status: int, why: str) -> bytes:
    """Encode a refusal of the HTTP server itself, in the same format as every other refusal."""
    return bytes(refusal(InvalidRequest(why), new_id("request-"), status=status).body)


class ClosingStream(StreamingResponse):
    """Response that closes its resources when it ends or the client disconnects."""

    def __init__(self, chunks: AsyncIterator[bytes], stack: AsyncExitStack, **kwargs: Any) -> None:
        super().__init__(chunks, **kwargs)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


def path_of(request: Request) -> str:
    """Return the path as routed. `Request.url` fails on a query that is not UTF-8."""
    path: str = request.scope["path"]
    return path


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
