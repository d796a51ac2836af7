"""HTTP descriptions of errors: a status for each class, a message, and the parameter."""

from __future__ import annotations

from collections.abc import Mapping

from afferent import errors as e

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
