"""Messages between frontends and an engine in another process: schema'd msgpack."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec import Struct

from afferent.engines.protocol import EngineInfo, EngineRequest, EngineStats, KeptSession
from afferent.errors import FormatError
from afferent.runtime.versions import mismatch, version_behind
from afferent.types import Failure, NonNegative, RequestId, Span, TokenLogprobs, decode

VERSION = 9
"""Version of all messages between frontends and an engine.

The version's position in `FrontendHello` and in `Refused` never changes, so that processes of any
two versions can name both.
"""
SCHEMA = "9-668cf2ddf8b44b3451ca3dea319909e1"
"""The version, and the digest of its messages (`tests.wire_schema`)."""


class _Message(Struct, array_like=True, forbid_unknown_fields=True):
    pass


# Frontend to engine.


class FrontendHello(_Message, tag="frontend"):
    """First message of a connection; answered by `Health`, or by `Refused`."""

    version: NonNegative
    name: str


class Submit(_Message, tag="submit"):
    request: EngineRequest


class Abort(_Message, tag="abort"):
    request_id: RequestId


class EndSession(_Message, tag="end"):
    session_id: RequestId


class FindSession(_Message, tag="find"):
    """Answered with `SessionFound`."""

    session_id: RequestId


class AskStats(_Message, tag="ask"):
    """Answered with `Stats`."""


# Engine to frontend.


class Health(_Message, tag="health"):
    """Sent at once, and whenever it changes."""

    info: EngineInfo | None


class Refused(_Message, tag="refused"):
    """Answer to a frontend of another version, which then disconnects."""

    version: NonNegative


class RequestAccepted(_Message, tag="accepted"):
    request_id: str


class RequestTokens(_Message, tag="tokens"):
    request_id: str
    token_ids: list[int]
    spans: list[Span]
    logprobs: list[TokenLogprobs]
    num_cached: NonNegative = 0


class RequestFinished(_Message, tag="finished"):
    request_id: str
    reason: Literal["stop", "length"]
    spans: list[Span]
    token_id: int | None = None
    num_cached: NonNegative = 0


class RequestFailed(_Message, tag="failed"):
    request_id: str
    failure: Failure


class Stats(_Message, tag="stats"):
    """Statistics; ``None``: there are none now."""

    stats: EngineStats | None


class SessionFound(_Message, tag="found"):
    """Sequence of a session; ``None``: there is none, or it is in use."""

    session_id: str
    session: KeptSession | None


FromFrontend = FrontendHello | Submit | Abort | EndSession | FindSession | AskStats
RequestEvent = RequestAccepted | RequestTokens | RequestFinished | RequestFailed
ToFrontend = Health | Stats | SessionFound | Refused | RequestEvent

_FRONTEND = msgspec.msgpack.encode("frontend")
from_frontend_decoder = msgspec.msgpack.Decoder(FromFrontend)
_to_frontend_decoder = msgspec.msgpack.Decoder(ToFrontend)


def refusal_of(frame: bytes) -> str:
    """Return the reason to refuse the sender of this first message; empty if it is accepted.

    A frontend of another version is refused, even if this version's schema can decode its message.
    """
    theirs = version_behind(frame, "frontend")
    if theirs == VERSION or not frame[1:].startswith(_FRONTEND):
        return ""
    return mismatch(us="the engine", ours=VERSION, them="a frontend", theirs=theirs)


def refused_by(refused: Refused) -> str:
    """Return the reason why the engine refused this frontend."""
    return mismatch(us="this frontend", ours=VERSION, them="the engine", theirs=refused.version)


def from_engine(frame: bytes) -> ToFrontend:
    """Decode a message of the engine.

    Raises:
        FormatError: It does not follow its schema; the error names the message.
    """
    try:
        message: ToFrontend = decode(_to_frontend_decoder, frame)
    except FormatError as error:
        kinds = [str(kind.__struct_config__.tag) for kind in get_args(ToFrontend)]
        # Behind a byte for the array and one for its tag's length.
        kind = next((kind for kind in kinds if frame[2:].startswith(kind.encode())), "unknown")
        raise FormatError(f"the engine's message {kind!r}") from error.__cause__
    return message
