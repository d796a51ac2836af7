"""What clients and the store daemon say to each other: schema'd msgpack, version 1.

A connection begins with `Hello` or `Bye`. Then come requests (`afferent.store.requests`), and for
each a `Reply` with its result (`afferent.store.results`). All their names are to be had from here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from afferent.errors import FormatError
from afferent.store.requests import (
    MAX_ALSO_FOR,
    MAX_ITEMS,
    NO_REPLY,
    WAITING,
    Abort,
    Acquire,
    AcquireItem,
    Clients,
    Create,
    CreateItem,
    Delete,
    Enter,
    Evict,
    Figures,
    Finish,
    Get,
    JobSpec,
    Leave,
    List,
    Push,
    Release,
    Request,
    Reserve,
    ReserveItem,
    Seal,
    SealItem,
    SlotName,
    Stat,
    Take,
    Unreserve,
    Wait,
    withdrawal,
)
from afferent.store.results import (
    ClientInfo,
    Evicted,
    KindStatistics,
    ObjectInfo,
    Order,
    Outcome,
    SlotStatistics,
    Statistics,
)
from afferent.types import Failure, NonNegative, decode

__all__ = [
    "MAX_ALSO_FOR",
    "MAX_ITEMS",
    "NO_REPLY",
    "VERSION",
    "WAITING",
    "Abort",
    "Acquire",
    "AcquireItem",
    "Bye",
    "ClientInfo",
    "Clients",
    "Create",
    "CreateItem",
    "Delete",
    "Enter",
    "Evict",
    "Evicted",
    "Figures",
    "Finish",
    "Get",
    "Hello",
    "JobSpec",
    "KindStatistics",
    "Leave",
    "List",
    "ObjectInfo",
    "Order",
    "Outcome",
    "Push",
    "Release",
    "Reply",
    "Request",
    "Reserve",
    "ReserveItem",
    "Seal",
    "SealItem",
    "SlotName",
    "SlotStatistics",
    "Stat",
    "Statistics",
    "Take",
    "Unreserve",
    "Wait",
    "Welcome",
    "hello_decoder",
    "reply_decoder",
    "request_decoder",
    "seq_of",
    "withdrawal",
]

VERSION = 1


class Hello(Struct, array_like=True, tag="hello", forbid_unknown_fields=True):
    """The first message of a connection; answered by `Welcome` and the arena's descriptor.

    ``token`` is a random number that a client keeps for its life. Who says hello, or `Bye`, says
    that nothing is in use any more which was held under an earlier connection with that token.
    """

    version: int
    writable: bool
    name: Annotated[str, Meta(max_length=64)]
    token: NonNegative


class Bye(Struct, array_like=True, tag="bye", forbid_unknown_fields=True):
    """The first and last message of a connection: its client has left the store.

    It is answered (by a `Welcome`, without the arena), and it has a connection of its own, so that
    a client can repeat it until an answer says that it has not been lost with a daemon.
    """

    token: NonNegative


class Welcome(Struct, array_like=True, forbid_unknown_fields=True):
    """``segment`` is the number of the store's epoch; ``client`` the client's own, never given to
    another one. It is 0 for who was not let in.
    """

    version: int
    segment: NonNegative
    client: NonNegative


class Reply(Struct, array_like=True, forbid_unknown_fields=True):
    """``result`` is the verb's own type, or nil with ``failure``."""

    seq: int
    result: msgspec.Raw
    failure: Failure | None = None


request_decoder = msgspec.msgpack.Decoder(Request)
hello_decoder = msgspec.msgpack.Decoder(Hello | Bye)
reply_decoder = msgspec.msgpack.Decoder(Reply)
_any_decoder = msgspec.msgpack.Decoder()


def seq_of(frame: bytes) -> int:
    """The ``seq`` of a request that does not follow its schema.

    Raises:
        FormatError: It is no request at all.
    """
    match decode(_any_decoder, frame):
        case [str(), int() as seq, *_]:
            return seq
        case _:
            raise FormatError("not a request")
