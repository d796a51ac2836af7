"""Errors that Afferent raises on purpose.

    AfferentError
    ├── ConfigError                  a setting is wrong; nothing was started
    ├── UnsupportedModel             no processor family knows this model
    ├── NotServed                    this server does not do what the endpoint is for
    ├── InvalidRequest               the client's fault; the same request fails again
    │   ├── UnsupportedParameter
    │   ├── ModelNotFound
    │   ├── ResponseNotFound         no answer with that id is stored
    │   ├── ConversationNotFound     no conversation or item with that id is stored
    │   ├── SessionNotFound          no live session with that id is stored
    │   ├── SessionContinued         another connection has taken the live session over
    │   ├── FileNotFound             no file with that id is stored
    │   ├── StorageQuotaExceeded     the tenant's limit of stored files is reached
    │   ├── NotAuthenticated         no API key, or an unknown one
    │   ├── BodyTooLarge
    │   ├── BodyTooSlow
    │   ├── TooManyItems
    │   ├── PromptTooLong
    │   ├── InvalidForm              unsupported structured output, or beyond its limits
    │   ├── ArenaTooSmall            the media could never be in the arena at once
    │   ├── InvalidPlaceholders      unsorted, overlapping, empty or outside the prompt
    │   ├── MediaNotCached           an item came by its id alone, and must be sent again
    │   ├── EncoderCacheFull         more embeddings than the encoder's limits ever allow
    │   └── InvalidMedia             this item can't be used
    │       ├── UnsupportedMedia     its first bytes match no supported format
    │       ├── MediaTooLarge        a limit on bytes, pixels or sides
    │       ├── ForbiddenUrl         the fetch policy refuses the address
    │       ├── FetchFailed          the media host did not deliver
    │       └── MediaNotEncodable    the engine's encoder fails for it
    ├── Unavailable                  try again: nothing was wrong with the request
    │   ├── StoreFull                no space that could be freed
    │   ├── NoPermitLeft             the limit on concurrent requests is reached
    │   ├── StoreUnavailable         the store daemon is gone or does not answer
    │   │   └── VersionMismatch      it speaks another version of the protocol
    │   ├── StoreRestarted           the objects were lost with an earlier epoch of the store
    │   ├── TierUnavailable          the tier does not answer; no request fails by it
    │   ├── WorkerDied               the process that worked on this request died
    │   ├── Quarantined              this item killed two workers; refused for a minute
    │   ├── ClientGone               a process that took part in an operation is gone
    │   ├── ConnectionClosed         the process on the other side of a socket is gone
    │   ├── EngineUnavailable
    │   ├── SessionLost              the engine has no such sequence: it begins again
    │   ├── QuotaExceeded            the tenant's limit on running requests is reached
    │   ├── FilesUnavailable         the store of files does not work
    │   └── DeadlineExceeded
    ├── StoreError                   the store's rules were broken by its caller
    │   ├── StaleHandle              the object behind a handle is gone
    │   └── NotPermitted             this lease does not allow this operation on this object
    ├── FileDamaged                  a stored file is not the file that was stored
    ├── FormatError                  bytes that are not a valid block, tree or message
    └── InternalError                a defect of ours
        └── UnusableEmbeddings       an item's embeddings do not fill its placeholder

Errors travel between processes as ``(code, message)``; `error_from` restores the class. The
messages are safe to show to a client: they contain no path, address or exception text of a library.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import ClassVar

from msgspec import Struct

_MAX_MESSAGE = 2000
_CUT = " ... "


class Param(enum.Enum):
    """Part of a request for which each API has its own name."""

    MESSAGES = enum.auto()
    """All messages, with their media."""
    PREVIOUS_ANSWER = enum.auto()
    """The answer that the request continues from."""


class AfferentError(Exception):
    """Root of the tree. ``code`` is stable: programs may compare it.

    Invariants, so that each error reaches the waiting process unchanged:

    - A text alone creates any of them, by position or as ``message``: a `DataLoader` of PyTorch
      recreates a worker's error with ``message=text`` in the training process.
    - ``args`` is the text, and all else is in ``__dict__``: `pickle` and `copy` use both.
    - A value that differs between two errors of a class is no attribute of the class: Ray's errors
      inherit from the class without a call of ``__init__``, and look up missing attributes in their
      cause.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "") -> None:
        super().__init__(*((message,) if message else ()))

    @property
    def message(self) -> str:
        """The text, short enough to be sent: a long one is cut in its middle."""
        if self.args and isinstance(cause := self.args[0], AfferentError):  # in Ray's errors
            return cause.message
        text = str(self.args[0]) if self.args else self.code
        if len(text) <= _MAX_MESSAGE:
            return text
        half = (_MAX_MESSAGE - len(_CUT)) // 2
        return f"{text[:half]}{_CUT}{text[-half:]}"


class ConfigError(AfferentError):
    code = "config_error"


class UnsupportedModel(AfferentError):
    code = "unsupported_model"


class NotServed(AfferentError):
    """This server does not do what the endpoint is for."""

    code = "not_served"


class InvalidRequest(AfferentError):
    """Request that fails again if it is repeated.

    ``param`` is the wrong part of the request, if it is a single one: under its API's name, or as a
    `Param` if no API is known.
    """

    code = "invalid_request"

    def __init__(self, message: str = "", *, param: str | Param | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class ResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class ConversationNotFound(InvalidRequest):
    code = "conversation_not_found"


class SessionNotFound(InvalidRequest):
    code = "session_not_found"


class SessionContinued(InvalidRequest):
    """Another connection has taken the session over."""

    code = "session_continued"


class FileNotFound(InvalidRequest):
    code = "file_not_found"


class StorageQuotaExceeded(InvalidRequest):
    code = "storage_quota_exceeded"


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
    """Request with items by id that are not cached any more; it works if it contains their data.

    ``uuids`` are the ids of these items.
    """

    code = "media_not_cached"

    def __init__(
        self,
        message: str = "",
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


class MediaNotEncodable(InvalidMedia):
    code = "media_not_encodable"


class Unavailable(AfferentError):
    """Temporary failure; ``retry_after_s`` is the suggested delay of a retry."""

    code = "unavailable"
    retryable = True

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Holder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Client of the store that has space of one kind of object.

    Attributes:
        client: Its id; 0 is the store itself, for its jobs.
        name: Its own name.
        pid: Its process.
        held_nbytes: Bytes of objects that it writes or has pinned.
        reserved_nbytes: Bytes reserved and not yet used.
        held_s: Age of its oldest pin.
    """

    client: int
    name: str
    pid: int
    held_nbytes: int
    reserved_nbytes: int
    held_s: float

    def __str__(self) -> str:
        told = f"{self.name or 'a client'} (client {self.client}, pid {self.pid})"
        held = f"{told}: {self.held_nbytes:,} bytes for {self.held_s:.1f} s"
        return f"{held}, {self.reserved_nbytes:,} reserved" if self.reserved_nbytes else held


class Shortage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Space of the kind of object that did not fit.

    Attributes:
        kind: Kind of object.
        requested_nbytes: Space that the call needed.
        share_nbytes: The region share of the kind: its part of the arena.
        held_nbytes: Part of it in objects that are being written or pinned, so not evictable.
        reserved_nbytes: Part of it reserved for other requests.
        num_queued: Reservations that wait for space of the kind.
        holders: Clients with the most pinned and reserved bytes, largest first.
    """

    kind: str
    requested_nbytes: int
    share_nbytes: int
    held_nbytes: int
    reserved_nbytes: int
    num_queued: int
    holders: tuple[Holder, ...] = ()

    def __str__(self) -> str:
        told = (
            f"{self.requested_nbytes:,} bytes of {self.kind} requested; region share "
            f"{self.share_nbytes:,}, in use {self.held_nbytes:,}, reserved {self.reserved_nbytes:,}"
        )
        if self.num_queued:
            told += f", {self.num_queued} reservations queued"
        if self.holders:
            told += "; held by " + "; ".join(map(str, self.holders))
        return told


class StoreFull(Unavailable):
    """Failure to find space in the store.

    ``shortage`` has the numbers, if the store knows them. They are in ``str(error)``, and not in
    ``message``, which a server's client may see.
    """

    code = "store_full"

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_s: float = 1.0,
        shortage: Shortage | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.shortage = shortage

    def __str__(self) -> str:
        if self.shortage is None:
            return super().__str__()
        return (
            f"{self.message}. {self.shortage}. Release what is not needed any more, or give the "
            "store a larger arena or the kind a larger region share"
        )


class NoPermitLeft(Unavailable):
    code = "no_permit_left"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class VersionMismatch(StoreUnavailable):
    code = "version_mismatch"


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


class SessionLost(Unavailable):
    code = "session_lost"


class QuotaExceeded(Unavailable):
    code = "rate_limit_exceeded"


class FilesUnavailable(Unavailable):
    code = "files_unavailable"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class StoreError(AfferentError):
    code = "store_error"


class StaleHandle(StoreError):
    code = "stale_handle"


class NotPermitted(StoreError):
    code = "not_permitted"


class FileDamaged(AfferentError):
    code = "file_damaged"


class FormatError(AfferentError):
    code = "format_error"


class InternalError(AfferentError):
    code = "internal_error"


class UnusableEmbeddings(InternalError):
    """Embeddings that do not fill their placeholder; nothing of the step was computed.

    ``sequence_id`` names the sequence of the step that they belong to.
    """

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
    """Yield the class and all its subclasses, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from walk(child)


def error_from(code: str, message: str, shortage: Shortage | None = None) -> AfferentError:
    """Return the error that another process raised; `InternalError` for an unknown code."""
    for cls in walk():
        if cls.code == code:
            error = cls(message)
            if isinstance(error, StoreFull):
                error.shortage = shortage
            return error
    return InternalError(f"unknown error code {code!r}: {message}")


def in_a_line(error: BaseException) -> str:
    """Return a foreign error for the operator: its class, and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
