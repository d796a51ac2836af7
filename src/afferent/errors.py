"""Every error that Afferent raises on purpose.

    AfferentError
    ├── ConfigError                  a setting is wrong; nothing was started
    ├── UnsupportedModel             no processor family knows this model
    ├── InvalidRequest               the client's fault; the same request fails again
    │   ├── UnsupportedParameter
    │   ├── ModelNotFound
    │   ├── ResponseNotFound         no answer of that id is kept
    │   ├── NotAuthenticated         no API key, or none that is known
    │   ├── BodyTooLarge
    │   ├── BodyTooSlow
    │   ├── TooManyItems
    │   ├── PromptTooLong
    │   ├── InvalidForm              answers of that form can't be made, or not within the limits
    │   ├── ArenaTooSmall            the media could never be in the arena at once
    │   ├── InvalidPlaceholders      unsorted, overlapping, empty or outside the prompt
    │   ├── MediaNotCached           an item came by name alone, and has to be sent again
    │   ├── EncoderCacheFull         more embeddings than the encoder's limits ever allow
    │   └── InvalidMedia             this item can't be used
    │       ├── UnsupportedMedia     its first bytes name no format that we read
    │       ├── MediaTooLarge        a limit on bytes, pixels or sides
    │       ├── ForbiddenUrl         the fetch policy refuses the address
    │       └── FetchFailed          the media host did not deliver
    ├── Unavailable                  try again: nothing was wrong with the request
    │   ├── StoreFull                no room that could be freed
    │   ├── NoPermitLeft             as many requests as may are at it already
    │   ├── StoreUnavailable         the store daemon is gone or does not answer
    │   ├── StoreRestarted           the objects were lost with a former life of the store
    │   ├── TierUnavailable          what keeps things beyond this machine; no request hears of it
    │   ├── WorkerDied               the process that worked on this request died
    │   ├── Quarantined              this item killed two workers; refused for a minute
    │   ├── ClientGone               a process that was to share in something is gone
    │   ├── ConnectionClosed         the process on the other side of a socket is gone
    │   ├── EngineUnavailable
    │   ├── QuotaExceeded            the tenant has as many requests running as it may have
    │   └── DeadlineExceeded
    ├── StoreError                   the store's rules were broken by its caller
    │   ├── StaleHandle              the object behind a handle is gone
    │   └── NotPermitted             this lease may not do that to this object
    ├── FormatError                  bytes that are not a valid block, tree or message
    └── InternalError                a defect of ours
        └── UnusableEmbeddings       an item's embeddings do not fill its placeholder

Errors travel between processes as ``(code, message)``; `error_from` gives the class back. The
messages are safe to show to a client: no path, address or exception text of a library is in them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import ClassVar

_MAX_MESSAGE = 2000


class Param(enum.Enum):
    """A part of a request that each API calls by a name of its own."""

    MESSAGES = enum.auto()
    """All that was said and shown."""
    PREVIOUS_ANSWER = enum.auto()
    """The answer that the conversation goes on from."""


class AfferentError(Exception):
    """The root of the tree. ``code`` is stable: programs may compare it."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        return str(self.args[0])[:_MAX_MESSAGE] if self.args else self.code


class ConfigError(AfferentError):
    code = "config_error"


class UnsupportedModel(AfferentError):
    code = "unsupported_model"


class InvalidRequest(AfferentError):
    """``param`` is the part of the request that is wrong, where one part is: as its API names it,
    or, where no API is known, a `Param`.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | Param | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class ResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class NotAuthenticated(InvalidRequest):
    code = "invalid_api_key"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"


class BodyTooSlow(InvalidRequest):
    code = "body_too_slow"


class TooManyItems(InvalidRequest):
    code = "too_many_items"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class InvalidForm(InvalidRequest):
    code = "invalid_form"


class ArenaTooSmall(InvalidRequest):
    code = "arena_too_small"


class InvalidPlaceholders(InvalidRequest):
    code = "invalid_placeholders"


class MediaNotCached(InvalidRequest):
    """Items that were named and not sent are not here any more: the same request works with their
    data in it. ``uuids`` are their names.
    """

    code = "media_not_cached"

    def __init__(
        self,
        message: str,
        *,
        param: str | Param | None = Param.MESSAGES,
        uuids: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, param=param)
        self.uuids = uuids


class EncoderCacheFull(InvalidRequest):
    code = "encoder_cache_full"


class InvalidMedia(InvalidRequest):
    code = "invalid_media"


class UnsupportedMedia(InvalidMedia):
    code = "unsupported_media"


class MediaTooLarge(InvalidMedia):
    code = "media_too_large"


class ForbiddenUrl(InvalidMedia):
    code = "forbidden_url"


class FetchFailed(InvalidMedia):
    code = "fetch_failed"


class Unavailable(AfferentError):
    """``retry_after_s`` is when it may be worth while to try again."""

    code = "unavailable"
    retryable = True
    retry_after_s: float = 1.0


class StoreFull(Unavailable):
    code = "store_full"


class NoPermitLeft(Unavailable):
    code = "no_permit_left"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class StoreRestarted(Unavailable):
    code = "store_restarted"


class TierUnavailable(Unavailable):
    code = "tier_unavailable"


class WorkerDied(Unavailable):
    code = "worker_died"


class Quarantined(Unavailable):
    code = "quarantined"


class ClientGone(Unavailable):
    code = "client_gone"


class ConnectionClosed(Unavailable):
    code = "connection_closed"


class EngineUnavailable(Unavailable):
    code = "engine_unavailable"


class QuotaExceeded(Unavailable):
    code = "rate_limit_exceeded"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class StoreError(AfferentError):
    code = "store_error"


class StaleHandle(StoreError):
    code = "stale_handle"


class NotPermitted(StoreError):
    code = "not_permitted"


class FormatError(AfferentError):
    code = "format_error"


class InternalError(AfferentError):
    code = "internal_error"


class UnusableEmbeddings(InternalError):
    """Of a sequence that is part of a step, which it names; nothing of the step was computed."""

    code = "unusable_embeddings"

    def __init__(
        self,
        message: str = "an item's embeddings do not fill its placeholder",
        *,
        sequence_id: str = "",
    ) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id


def walk(root: type[AfferentError] = AfferentError) -> Iterator[type[AfferentError]]:
    """The class and all below it, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from walk(child)


def error_from(code: str, message: str) -> AfferentError:
    """The error that another process raised; `InternalError` for a code nobody knows."""
    for cls in walk():
        if cls.code == code:
            return cls(message)
    return InternalError(f"unknown error code {code!r}: {message}")


def in_a_line(error: BaseException) -> str:
    """Somebody else's error, for the operator: its class, and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
