"""Begin of a connection: `Hello` or `Bye`, and the daemon's `Welcome`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from afferent.errors import FormatError, VersionMismatch
from afferent.runtime.versions import mismatch, version_behind
from afferent.types import NonNegative, decode

VERSION = 8
"""Version of all messages between clients and the daemon, and of their payloads for workers.

Its position in `Hello` and in `Welcome` never changes, so that processes of any two versions can
name both.
"""
SCHEMA = "8-79a246a723f9f63df1431e11389c576d"
"""The version, and the digest of its messages (`tests.wire_schema`)."""


class Hello(Struct, array_like=True, tag="hello", forbid_unknown_fields=True):
    """First message of a connection; answered by `Welcome` and the arena's descriptor.

    ``token`` is a random number that a client keeps for its life. By `Hello` or `Bye`, a client
    reports that it uses nothing from its earlier connections with that token.
    """

    version: int
    writable: bool
    name: Annotated[str, Meta(max_length=64)]
    token: NonNegative


class Bye(Struct, array_like=True, tag="bye", forbid_unknown_fields=True):
    """First and last message of a connection: the client has left the store.

    The answer is a `Welcome` without the arena. It has a connection of its own, so that a client
    can repeat it until an answer proves that no daemon crash has lost it.
    """

    token: NonNegative


class Welcome(Struct, array_like=True, forbid_unknown_fields=True):
    """Answer to `Hello` and `Bye`.

    ``segment`` is the number of the store's epoch. ``client`` is the client's number, which no
    other client ever gets; 0 if it was not accepted.
    """

    version: int
    segment: NonNegative
    client: NonNegative


_hello_decoder = msgspec.msgpack.Decoder(Hello | Bye)
_welcome_decoder = msgspec.msgpack.Decoder(Welcome)


def read_hello(frame: bytes) -> Hello | Bye:
    """Return the first message of a client.

    Raises:
        VersionMismatch: The client speaks another version of the protocol.
        FormatError: The message does not follow this version's schema.
    """
    try:
        hello: Hello | Bye = decode(_hello_decoder, frame)
    except FormatError:
        theirs = version_behind(frame, "hello")
        if theirs == VERSION:
            raise
        raise client_mismatch(theirs) from None
    if isinstance(hello, Hello) and hello.version != VERSION:
        raise client_mismatch(hello.version)
    return hello


def client_mismatch(theirs: int | None) -> VersionMismatch:
    """Return the daemon's error for a client of another version."""
    return VersionMismatch(
        mismatch(us="the store daemon", ours=VERSION, them="a client", theirs=theirs)
    )


def read_welcome(frame: bytes) -> Welcome:
    """Return the daemon's answer.

    Raises:
        VersionMismatch: The daemon speaks another version of the protocol.
        FormatError: The message does not follow this version's schema.
    """
    theirs = version_behind(frame)
    if theirs is not None and theirs != VERSION:
        raise VersionMismatch(
            mismatch(us="this client", ours=VERSION, them="the store daemon", theirs=theirs)
        )
    return decode(_welcome_decoder, frame)
