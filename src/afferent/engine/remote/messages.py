"""What frontends and an engine in another process say to each other: schema'd msgpack."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec import Struct

from afferent.engine.protocol import EngineInfo, EngineRequest, EngineStats
from afferent.errors import FormatError
from afferent.runtime.versions import mismatch, version_behind
from afferent.types import Failure, NonNegative, RequestId, Span, TokenLogprobs, decode

VERSION = 1
"""Version of all messages between frontends and an engine.

The version stays where it is in `FrontendHello` and in `Refused`, so that processes of any two
versions can name both.
"""
SCHEMA = "1-985a52fc507652e48f84af4fdc60abe2"
"""The version, and the digest of its messages (`tests.wire_schema`)."""


class _Message(Struct, array_like=True, forbid_unknown_fields=True):
    pass


# Frontend to engine.


class FrontendHello(_Message, tag="frontend"):
    """The first message of a connection; answered by `Health`, or by `Refused`."""

    version: NonNegative
    name: str


class Submit(_Message, tag="submit"):
    request: EngineRequest


class Abort(_Message, tag="abort"):
    request_id: RequestId


class AskStats(_Message, tag="ask"):
    """Answered with `Stats`."""


# Engine to frontend.


class Health(_Message, tag="health"):
    """Sent at once, and whenever it changes."""

    info: EngineInfo | None


class Refused(_Message, tag="refused"):
    """The answer to a frontend of another version, which leaves then."""

    version: NonNegative


class RequestAccepted(_Message, tag="accepted"):
    request_id: str


class RequestTokens(_Message, tag="tokens"):
    request_id: str
    token_ids: list[int]
    spans: list[Span]
    logprobs: list[TokenLogprobs]


class RequestFinished(_Message, tag="finished"):
    request_id: str
    reason: Literal["stop", "length"]
    spans: list[Span]
    token_id: int | None = None


class RequestFailed(_Message, tag="failed"):
    request_id: str
    failure: Failure


class Stats(_Message, tag="stats"):
    """``None``: there are none to be had now."""

    stats: EngineStats | None


FromFrontend = FrontendHello | Submit | Abort | AskStats
RequestEvent = RequestAccepted | RequestTokens | RequestFinished | RequestFailed
ToFrontend = Health | Stats | Refused | RequestEvent

_FRONTEND = msgspec.msgpack.encode("frontend")
from_frontend_decoder = msgspec.msgpack.Decoder(FromFrontend)
_to_frontend_decoder = msgspec.msgpack.Decoder(ToFrontend)


def refusal_of(frame: bytes) -> str:
    """Return why the sender of this first message is refused; empty where it is not.

    A frontend of another version is, whether this version's schema can read its message or not.
    """
    theirs = version_behind(frame, "frontend")
    if theirs == VERSION or not frame[1:].startswith(_FRONTEND):
        return ""
    return mismatch(us="the engine", ours=VERSION, them="a frontend", theirs=theirs)


def refused_by(refused: Refused) -> str:
    """Return why this frontend was refused."""
    return mismatch(us="this frontend", ours=VERSION, them="the engine", theirs=refused.version)


def from_engine(frame: bytes) -> ToFrontend:
    """What an engine says.

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
