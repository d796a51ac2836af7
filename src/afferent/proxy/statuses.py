"""Conversion of errors to HTTP: a status for each class, a message, the parameter, headers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from afferent import errors as e

log = logging.getLogger(__name__)

# The nearest class decides; a test checks that each error class is listed or inherits.
_STATUS: dict[type[e.AfferentError], int] = {
    e.ModelNotFound: 404,
    e.NotServed: 501,
    e.ResponseNotFound: 404,
    e.ConversationNotFound: 404,
    e.SessionNotFound: 404,
    e.SessionContinued: 409,
    e.FileNotFound: 404,
    e.StorageQuotaExceeded: 403,
    e.NotAuthenticated: 401,
    e.BodyTooLarge: 413,
    e.BodyTooSlow: 408,
    e.ArenaTooSmall: 413,
    e.MediaNotCached: 409,
    e.MediaNotEncodable: 422,
    e.InvalidRequest: 400,
    e.QuotaExceeded: 429,
    e.Unavailable: 503,
    e.AfferentError: 500,
}


def status_of(error: e.AfferentError) -> int:
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def message_of(error: e.AfferentError) -> str:
    """Return the message; an internal error shows no detail."""
    return error.message if status_of(error) != 500 else "the server failed on this request"


def param_of(error: e.AfferentError, names: Mapping[e.Param, str]) -> str | None:
    """Return the invalid parameter, by the API's own name for it."""
    if not isinstance(error, e.InvalidRequest):
        return None
    return names.get(error.param) if isinstance(error.param, e.Param) else error.param


def failure_of(error: Exception) -> e.AfferentError:
    """Return the client's error for an exception; an internal error is logged."""
    if isinstance(error, TimeoutError):
        return e.DeadlineExceeded("the request took too long; try again")
    failure = error if isinstance(error, e.AfferentError) else e.InternalError("unexpected")
    if status_of(failure) == 500:
        log.error("a request failed", exc_info=error)
    return failure


def headers_of(error: e.AfferentError) -> dict[str, str]:
    if isinstance(error, e.NotServed):
        return {"x-should-retry": "false"}  # clients repeat a 5xx
    if isinstance(error, e.MediaNotCached):
        return {"x-should-retry": "false"}  # clients of these APIs repeat a 409 unchanged
    if isinstance(error, e.BodyTooSlow):  # the rest of the body is not worth waiting for
        return {"connection": "close"}
    if isinstance(error, e.Unavailable):
        return {"retry-after": str(math.ceil(error.retry_after_s))}
    return {}
