"""How a connection begins: `Hello` or `Bye`, and the daemon's `Welcome`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from afferent.types import NonNegative

VERSION = 1
"""Of all that clients and the daemon say to each other."""


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


hello_decoder = msgspec.msgpack.Decoder(Hello | Bye)
