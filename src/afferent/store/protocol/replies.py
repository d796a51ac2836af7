"""Replies, and the decoding of requests and replies."""

from __future__ import annotations

from typing import Any, TypeVar, Union, get_args

import msgspec
from msgspec import Struct

from afferent.errors import FormatError, error_from
from afferent.store.protocol.refusals import UNREADABLE, explained
from afferent.store.protocol.requests import VERBS, Request
from afferent.types import Failure, decode, encode

Result = TypeVar("Result")


class Reply(Struct, array_like=True, forbid_unknown_fields=True):
    """Answer to a request: ``result`` has the verb's own type, or is nil with ``failure``."""

    seq: int
    result: msgspec.Raw
    failure: Failure | None = None


def result_type(verb: type[Request[Any]]) -> object:
    """Return the type argument of ``Request[...]`` in the verb's definition."""
    (base,) = verb.__orig_bases__  # type: ignore[attr-defined]
    (found,) = get_args(base)
    return found


request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(Union[VERBS])  # noqa: UP007
reply_decoder = msgspec.msgpack.Decoder(Reply)
_any_decoder = msgspec.msgpack.Decoder()
_result_decoders: dict[type[Request[Any]], msgspec.msgpack.Decoder[Any]] = {
    verb: msgspec.msgpack.Decoder(result_type(verb)) for verb in VERBS
}


def result_of(request: Request[Result], reply: Reply) -> Result:
    """Return the result of a reply.

    Raises:
        AfferentError: The verb failed with this error.
    """
    if reply.failure is not None:
        failure = reply.failure
        raise error_from(failure.code, explained(request, failure.message), failure.shortage)
    result: Result = _result_decoders[type(request)].decode(reply.result)
    return result


def refusal(seq: int, error: FormatError) -> Reply:
    """Return the reply to a request that does not follow its schema."""
    failure = Failure(error.code, f"{UNREADABLE}: {error.__cause__}"[:500])
    return Reply(seq, msgspec.Raw(encode(None)), failure)


def seq_of(frame: bytes) -> int:
    """Return the ``seq`` of a request that does not follow its schema.

    Raises:
        FormatError: It is not a request.
    """
    match decode(_any_decoder, frame):
        case [str(), int() as seq, *_]:
            return seq
        case _:
            raise FormatError("not a request")
