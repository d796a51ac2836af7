"""Conversion of errors to HTTP answers."""

from __future__ import annotations

import logging
import math

from afferent import errors as e
from afferent.proxy.statuses import status_of

log = logging.getLogger(__name__)


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
