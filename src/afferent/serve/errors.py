"""Errors as HTTP answers: a status for each class of the tree, and OpenAI's form."""

from __future__ import annotations

import logging
import math
from typing import Any

from afferent import errors as e

log = logging.getLogger(__name__)

# The nearest class decides; a test walks the tree and finds each class here or below one of these.
_STATUS: dict[type[e.AfferentError], int] = {
    e.ModelNotFound: 404,
    e.ResponseNotFound: 404,
    e.NotAuthenticated: 401,
    e.BodyTooLarge: 413,
    e.BodyTooSlow: 408,
    e.ArenaTooSmall: 413,
    e.MediaNotCached: 409,
    e.InvalidRequest: 400,
    e.QuotaExceeded: 429,
    e.Unavailable: 503,
    e.AfferentError: 500,
}


def failure_of(error: Exception) -> e.AfferentError:
    """What the client hears of whatever went wrong; a defect of ours is logged."""
    if isinstance(error, TimeoutError):
        return e.DeadlineExceeded("the request took too long; try again")
    failure = error if isinstance(error, e.AfferentError) else e.InternalError("unexpected")
    if status_of(failure) == 500:
        log.error("a request failed", exc_info=error)
    return failure


def status_of(error: e.AfferentError) -> int:
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def openai_body(error: e.AfferentError) -> dict[str, Any]:
    """The error as OpenAI's API writes it. A defect of ours shows no detail."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = error.message if status != 500 else "the server failed on this request"
    param = getattr(error, "param", None)
    body = {"message": message, "type": kind, "param": param, "code": error.code}
    if isinstance(error, e.MediaNotCached):
        body["uuids"] = error.uuids
    return {"error": body}


def headers_of(error: e.AfferentError) -> dict[str, str]:
    if isinstance(error, e.MediaNotCached):
        return {"x-should-retry": "false"}  # clients of these APIs repeat a 409 as it was
    if isinstance(error, e.BodyTooSlow):  # what it still sends is not worth waiting for
        return {"connection": "close"}
    if isinstance(error, e.Unavailable):
        return {"retry-after": str(math.ceil(error.retry_after_s))}
    return {}
