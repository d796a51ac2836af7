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
    │   │   └── VersionMismatch      it speaks another version of the protocol
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

from msgspec import Struct

_MAX_MESSAGE = 2000
_CUT = " ... "


class Param(enum.Enum):
    """A part of a request that each API calls by a name of its own."""

    MESSAGES = enum.auto()
    """All that was said and shown."""
    PREVIOUS_ANSWER = enum.auto()
    """The answer that the conversation goes on from."""


class AfferentError(Exception):
    """The root of the tree. ``code`` is stable: programs may compare it.

    Invariants, so that each error reaches the process that waits for it as what it is:

    - a text alone makes any of them, by position or as ``message``: a `DataLoader` of PyTorch
      makes a worker's error anew with ``message=text`` in the training process;
    - ``args`` is the text, and all else is in ``__dict__``, which is what `pickle` and `copy` take;
    - what can differ between two errors of a class is no attribute of the class: Ray's errors
      inherit from the class without calling ``__init__``, and ask their cause for what is missing.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "") -> None:
        super().__init__(*((message,) if message else ()))

    @property
    def message(self) -> str:
        """The text, short enough to be sent: of a long one, how it begins and how it ends."""
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


class InvalidRequest(AfferentError):
    """``param`` is the part of the request that is wrong, where one part is: as its API names it,
    or, where no API is known, a `Param`.
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


class Unavailable(AfferentError):
    """``retry_after_s`` is when it may be worth while to try again."""

    code = "unavailable"
    retryable = True

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Holder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A client of the store that holds space of one kind of object.

    Attributes:
        client: Its number; 0 is the store itself, for its jobs.
        name: What it calls itself.
        pid: Its process.
        held_nbytes: Of objects that it writes or has pinned.
        reserved_nbytes: Reserved, and not yet used.
        held_s: For how long it has held the object that it has held longest.
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
    """The space that there was, of the kind of object that did not fit.

    Attributes:
        kind: Of object.
        requested_nbytes: Space that the call needed.
        share_nbytes: The region share of the kind: its part of the arena.
        held_nbytes: Of it, in objects that are being written or pinned, so not evictable.
        reserved_nbytes: Of it, reserved for others.
        num_queued: Reservations that wait for space of the kind.
        holders: The clients that hold or have reserved most of it, largest first.
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
    """``shortage`` has the numbers, where the store knows them. They are in ``str(error)``, and
    not in ``message``, which a server's client may see.
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


def error_from(code: str, message: str, shortage: Shortage | None = None) -> AfferentError:
    """The error that another process raised; `InternalError` for a code nobody knows."""
    for cls in walk():
        if cls.code == code:
            error = cls(message)
            if isinstance(error, StoreFull):
                error.shortage = shortage
            return error
    return InternalError(f"unknown error code {code!r}: {message}")


def in_a_line(error: BaseException) -> str:
    """Somebody else's error, for the operator: its class, and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])
