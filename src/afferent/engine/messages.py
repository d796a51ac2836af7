"""What frontends, the engine core and its worker say to each other: schema'd msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from afferent.engine.protocol import EngineInfo, EngineRequest
from afferent.types import Failure, RequestId, Span


class _Message(Struct, array_like=True, forbid_unknown_fields=True):
    pass


# The first message of a connection to the core.


class FrontendHello(_Message, tag="frontend"):
    name: str


class WorkerHello(_Message, tag="worker"):
    """The worker has loaded the model and can be used."""

    pid: int
    info: EngineInfo


# Frontend to core.


class Submit(_Message, tag="submit"):
    request: EngineRequest


class Abort(_Message, tag="abort"):
    request_id: RequestId


# Core to frontend.


class Health(_Message, tag="health"):
    """Sent at once, and whenever it changes."""

    info: EngineInfo | None


class RequestAccepted(_Message, tag="accepted"):
    request_id: str


class RequestTokens(_Message, tag="tokens"):
    request_id: str
    token_ids: list[int]
    spans: list[Span]


class RequestFinished(_Message, tag="finished"):
    request_id: str
    reason: Literal["stop", "length"]
    spans: list[Span]


class RequestFailed(_Message, tag="failed"):
    request_id: str
    failure: Failure


# Core to worker and back.


class RunStep(_Message, tag="step"):
    """Drop these sequences' caches, prefill this one, decode a token of each of those."""

    drop: list[str]
    prefill: EngineRequest | None
    decode: list[str]


class StepDone(_Message, tag="done"):
    """A token for each sequence of the step that did not fail."""

    tokens: list[tuple[str, int]]
    failures: list[tuple[str, Failure]]
    spans: list[Span]


ToCore = FrontendHello | WorkerHello | Submit | Abort | StepDone
ToFrontend = Health | RequestAccepted | RequestTokens | RequestFinished | RequestFailed

to_core_decoder = msgspec.msgpack.Decoder(ToCore)
to_frontend_decoder = msgspec.msgpack.Decoder(ToFrontend)
to_worker_decoder = msgspec.msgpack.Decoder(RunStep)
