"""Table of handlers by request class. Pure.

A handler is a method of the state machine. It takes the client and its request, and returns the
verb's result, or `LATER`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from afferent.store.protocol.requests import VERBS, Request
from afferent.types import ClientId


class Later(Enum):
    """Result of a verb that is answered later."""

    LATER = 0


LATER = Later.LATER

Machine = TypeVar("Machine")
Asked = TypeVar("Asked", bound=Request[Any])
Result = TypeVar("Result")

Handler = Callable[[Machine, ClientId, Asked], Result | Later]

HANDLERS: dict[type[Request[Any]], Handler[Any, Any, Any]] = {}


def handles(
    verb: type[Request[Result]],
) -> Callable[[Handler[Machine, Asked, Result]], Handler[Machine, Asked, Result]]:
    """Register the decorated method as the handler of ``verb``."""

    def register(handler: Handler[Machine, Asked, Result]) -> Handler[Machine, Asked, Result]:
        HANDLERS[verb] = handler
        return handler

    return register


def check_all() -> None:
    """Check that each verb has a handler.

    Raises:
        TypeError: A verb has none.
    """
    if missing := [verb.__name__ for verb in VERBS if verb not in HANDLERS]:
        raise TypeError(f"verbs without a handler: {missing}")
