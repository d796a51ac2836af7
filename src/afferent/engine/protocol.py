"""What an engine must offer to be put behind Afferent's frontends.

A request arrives as token ids and `Item`s: handles of sealed features, with the placeholder each
one fills. The engine pins the handles under its own connection to the store and says `Accepted`;
from then on the frontend holds nothing for the request. How to write an engine:
`docs/writing-an-engine.md`; whether it keeps what is promised here:
`afferent.testing.engine_conformance`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from afferent.types import Item, Modality, NonNegative, RequestId, Sampling, Span, TokenLogprobs


class EngineRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``request_id`` is used once; only a request that was refused may come again under its own."""

    request_id: RequestId
    token_ids: Annotated[list[NonNegative], Meta(min_length=1)]
    items: list[Item]
    sampling: Sampling


class Accepted(Struct, frozen=True):
    """The engine holds its own pins now."""


class Tokens(Struct, frozen=True):
    """The next tokens of the answer, and what has been added to the request's trace.

    ``logprobs`` has an entry for each token if the request asked for them, and none otherwise.
    """

    token_ids: list[int]
    spans: list[Span]
    logprobs: list[TokenLogprobs] = []


class Finished(Struct, frozen=True):
    """The end of the answer, and the rest of its trace."""

    reason: Literal["stop", "length"]
    spans: list[Span]


EngineEvent = Accepted | Tokens | Finished


class Chosen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The token that a step chose for a sequence."""

    sequence_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None = None


SamplingField = Literal["temperature", "top_p", "top_k", "seed", "num_logprobs"]


class EngineInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What frontends have to know of the engine's model."""

    max_model_len: int
    eos_token_ids: list[int]
    embed_nbytes: int = 0
    """Bytes of one row of embeddings, all its layers together."""
    can_split_items: bool = True
    """Whether a chunk of prompt may end inside an item; not where an item attends to itself."""
    cross_attention: bool = False
    """An encoder-decoder model: its items are beside the prompt, at offset 0."""
    kv_token_nbytes: int = 0
    """This machine's memory that a token of a running request may take, in all workers together;
    0: none, or not said.
    """
    modalities: tuple[Modality, ...] = tuple(Modality)
    """What its items may be, of what the model's family makes features of."""
    unsupported: tuple[SamplingField, ...] = ()
    """What of `Sampling` it can't do. Frontends refuse requests that ask for it."""


class EngineStats(Struct, array_like=True, forbid_unknown_fields=True):
    """What an engine has done since it was started, and what it does now."""

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Positions computed in chunks, after a preemption again."""
    num_decode_tokens: int = 0
    num_preempted: int = 0
    num_restarts: int = 0
    """How often workers were lost."""
    num_embeddings_found: int = 0
    """Items whose embeddings were in the store."""
    num_encoded: list[int] = []
    """Items that each worker has encoded, by rank."""
    cache_nbytes: int = 0
    """Bytes of embeddings that each worker keeps."""


class Engine(Protocol):
    """An engine as a frontend sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """`None` while the engine can't take requests."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request: `Accepted` once, then `Tokens`, then `Finished`.

        Closing the iterator early aborts the request. However a request ends, the engine gives back
        all that it held for it. The token that ends an answer is not said, unless
        ``ignore_eos`` asks to go on.

        Raises:
            EngineUnavailable: The engine is not there, or went away (so may any `Unavailable` say);
                retryable.
            InvalidPlaceholders: They overlap, are not in order, or lie outside of the prompt.
            UnsupportedParameter: The sampling asks for what this engine can't do.
            StaleHandle: An item's features are gone.
            StoreRestarted: They were lost with a former life of the store.
        """
        ...

    async def stats(self) -> EngineStats | None:
        """`None` if there are none to be had now."""
        ...
