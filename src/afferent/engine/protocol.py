"""What an engine must offer to be put behind Afferent's frontends.

A request arrives as token ids and `Item`s: handles of sealed features, with the placeholder each
one fills. The engine pins the handles under its own connection to the store and says `Accepted`;
from then on the frontend holds nothing for the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from afferent.types import Item, NonNegative, RequestId, Sampling, Span


class EngineRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request_id: RequestId
    token_ids: Annotated[list[NonNegative], Meta(min_length=1)]
    items: list[Item]
    sampling: Sampling


class Accepted(Struct, frozen=True):
    """The engine holds its own pins now."""


class Tokens(Struct, frozen=True):
    """The next tokens of the answer, and what has been added to the request's account."""

    token_ids: list[int]
    spans: list[Span]


class Finished(Struct, frozen=True):
    """The end of the answer, and the rest of its account."""

    reason: Literal["stop", "length"]
    spans: list[Span]


EngineEvent = Accepted | Tokens | Finished


class EngineInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What frontends have to know of the engine's model."""

    max_model_len: int
    eos_token_ids: list[int]


class Engine(Protocol):
    """An engine as a frontend sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """`None` while the engine can't take requests."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request: `Accepted`, then `Tokens`, then `Finished`.

        Closing the iterator early aborts the request.

        Raises:
            EngineUnavailable: The engine is not there, or went away; retryable.
            StaleHandle: An item's features are gone.
            StoreRestarted: They were lost with a former life of the store.
        """
        ...
