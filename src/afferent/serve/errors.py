"""Errors as HTTP answers: a status for each class of the tree, and OpenAI's form."""

from __future__ import annotations

import math
from typing import Any

from afferent import errors as e

# The nearest class decides; a test walks the tree and finds each class here or below one of these.
_STATUS: dict[type[e.AfferentError], int] = {
    e.ModelNotFound: 404,
    e.BodyTooLarge: 413,
    e.BodyTooSlow: 408,
    e.ArenaTooSmall: 413,
    e.InvalidRequest: 400,
    e.Unavailable: 503,
    e.AfferentError: 500,
}


def status_of(error: e.AfferentError) -> int:
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def openai_body(error: e.AfferentError) -> dict[str, Any]:
    """The error as OpenAI's API writes it. A defect of ours shows no detail."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = error.message if status != 500 else "the server failed on this request"
    return openai_error(message, error.code, kind=kind, param=getattr(error, "param", None))


def openai_error(
    message: str, code: str, *, kind: str = "invalid_request_error", param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers_of(error: e.AfferentError) -> dict[str, str]:
    if not isinstance(error, e.Unavailable):
        return {}
    return {"retry-after": str(math.ceil(error.retry_after_s))}
