"""What is done for each verb: a table of handlers by the request's class. Pure.

A handler is a method of the state machine that takes the client and its request. It returns the
verb's result, or `LATER`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from afferent.store.protocol.requests import VERBS, Request
from afferent.types import ClientId


class Later(Enum):
    """The result of a verb that is answered when there is something to say."""

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
    """This method is what is done for ``verb``."""

    def register(handler: Handler[Machine, Asked, Result]) -> Handler[Machine, Asked, Result]:
        HANDLERS[verb] = handler
        return handler

    return register


def check_all() -> None:
    """Raises: TypeError: There is a verb for which nothing is done."""
    if missing := [verb.__name__ for verb in VERBS if verb not in HANDLERS]:
        raise TypeError(f"verbs without a handler: {missing}")
