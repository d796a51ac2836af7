"""What an engine must offer to be put behind Afferent's frontends.

A request arrives as token ids and `Item`s: handles of sealed features, with the placeholder each
one fills. The engine pins the handles under its own connection to the store and says `Accepted`;
from then on the frontend holds nothing for the request. How to write an engine:
`docs/writing-an-engine.md`; whether it keeps what is promised here:
`afferent.testing.engine_conformance`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Annotated, Final, Literal, Protocol, get_args

import msgspec
from msgspec import Meta, Struct

from afferent.errors import ConfigError
from afferent.quota.shares import NAMELESS, Share
from afferent.types import Item, Modality, NonNegative, RequestId, Sampling, Span, TokenLogprobs


class EngineRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an engine is asked.

    Attributes:
        request_id: Used once; only a request that was refused may come again under its own.
        token_ids: The prompt, with a token in each place that an item fills.
        items: In prompt order.
        sampling: How the answer's tokens are chosen.
        share: Whose it is, for an engine that divides its steps fairly; with
            `afferent.schedule.Scheduler` that is to pass it on.
        answer_of: The request that this one answers, where several answer one (``n`` above 1): an
            engine that divides its steps fairly counts them as one. Empty: it stands alone.
    """

    request_id: RequestId
    token_ids: Annotated[list[NonNegative], Meta(min_length=1)]
    items: list[Item]
    sampling: Sampling
    share: Share = NAMELESS
    answer_of: str = ""


class Accepted(Struct, frozen=True):
    """The engine holds its own pins now."""


class Tokens(Struct, frozen=True):
    """The next tokens of the answer.

    Attributes:
        token_ids: At least one.
        spans: What has been added to the request's trace; may be empty.
        logprobs: An entry for each token if the request asked for them, and none otherwise.
    """

    token_ids: list[int]
    spans: list[Span]
    logprobs: list[TokenLogprobs] = []


class Finished(Struct, frozen=True):
    """The end of the answer.

    Attributes:
        reason: ``stop`` after a token that ends the answer, ``length`` after ``max_tokens``.
        spans: The rest of the request's trace; may be empty.
        token_id: The token that ended it, which is not said before; ``None``: none, or not told.
    """

    reason: Literal["stop", "length"]
    spans: list[Span]
    token_id: int | None = None


EngineEvent = Accepted | Tokens | Finished


class Chosen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The token that a step chose for a sequence."""

    sequence_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None = None


SamplingField = Literal["temperature", "top_p", "top_k", "seed", "num_logprobs"]
"""What an engine is taken to do unless it says that it doesn't."""

SamplingExtra = Literal[
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "json_schema",
    "regex",
    "choice",
]
"""What no engine is taken to do unless it says so."""


class EngineInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What frontends have to know of the engine's model. A value that they could not read is a
    `ConfigError` where it is made.

    Attributes:
        max_model_len: Most tokens of a prompt and its answer.
        eos_token_ids: Those that end an answer.
        embed_nbytes: Bytes of one row of embeddings, all its layers together.
        can_split_items: Whether a chunk of prompt may end inside an item; not where an item attends
            to itself.
        cross_attention: An encoder-decoder model: its items are beside the prompt, at offset 0.
        kv_token_nbytes: This machine's memory that a token of a running request may take, in all
            workers together; 0: none, or not said.
        modalities: What its items may be, of what the model's family makes features of.
        unsupported: Fields of `Sampling` that it can't do: ``temperature``, ``top_p``, ``top_k``,
            ``seed``, ``num_logprobs``. Frontends refuse requests that ask for them, so that it
            never gets one that does.
        supported: Fields of `Sampling` that it does besides: ``min_p``, ``repetition_penalty``,
            ``frequency_penalty``, ``presence_penalty``, ``logit_bias``, ``min_tokens``,
            ``stop_token_ids``, ``json_schema``, ``regex``, ``choice``. Requests that ask for others
            are refused likewise.
        vocab_size: How many tokens the model chooses from; ids beyond are refused. 0: not said.
    """

    max_model_len: int
    eos_token_ids: list[int]
    embed_nbytes: int = 0
    can_split_items: bool = True
    cross_attention: bool = False
    kv_token_nbytes: int = 0
    modalities: tuple[Modality, ...] = tuple(Modality)
    unsupported: tuple[SamplingField, ...] = ()
    supported: tuple[SamplingExtra, ...] = ()
    vocab_size: int = 0

    @property
    def lacking(self) -> tuple[str, ...]:
        """All fields of `Sampling` that it can't do."""
        extras = [name for name in get_args(SamplingExtra) if name not in self.supported]
        return (*self.unsupported, *extras)

    def __post_init__(self) -> None:
        for field in _info_fields():
            try:
                msgspec.convert(msgspec.to_builtins(getattr(self, field.name)), field.type)
            except (msgspec.ValidationError, TypeError) as error:
                choices = _CHOICES.get(field.name, ())
                allowed = f"; allowed are {', '.join(choices)}" if choices else ""
                raise ConfigError(f"EngineInfo.{field.name}: {error}{allowed}") from None


_CHOICES: Final = {
    "modalities": tuple(Modality),
    "unsupported": get_args(SamplingField),
    "supported": get_args(SamplingExtra),
}


@functools.cache  # each look at them evaluates every annotation
def _info_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(EngineInfo)


class EngineStats(Struct, array_like=True, forbid_unknown_fields=True):
    """What an engine has done since it was started, and what it does now.

    Attributes:
        num_waiting: Requests that wait to be run.
        num_running: Requests that steps are done for.
        num_steps: Steps.
        num_prompt_tokens: Positions computed in chunks, after a preemption again.
        num_decode_tokens: Positions of answers that were computed.
        num_preempted: Requests that had to begin again for want of room.
        num_restarts: How often workers were lost.
        num_embeddings_found: Items whose embeddings were in the store.
        num_encoded: Items that each worker has encoded, by rank.
        cache_nbytes: Bytes of embeddings that each worker keeps.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_preempted: int = 0
    num_restarts: int = 0
    num_embeddings_found: int = 0
    num_encoded: list[int] = []
    cache_nbytes: int = 0


class Engine(Protocol):
    """An engine as a frontend sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """`None` while the engine can't take requests."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request: `Accepted` once, then `Tokens`, then `Finished`.

        Closing the iterator early aborts the request. However a request ends, the engine gives back
        all that it held for it. The token that ends an answer is not among its tokens, unless
        ``ignore_eos`` asks to go on; `Finished` may tell it.

        Raises:
            EngineUnavailable: The engine is not there, or went away (so may any `Unavailable` say);
                retryable.
            InvalidPlaceholders: They overlap, are not in order, or lie outside of the prompt.
            UnsupportedParameter: The sampling asks for what this engine can't do.
            InvalidForm: Answers of the form that it asks for can't be made; also later, where one
                becomes too much to go on with.
            StaleHandle: An item's features are gone.
            StoreRestarted: They were lost with a former life of the store.
        """
        ...

    async def stats(self) -> EngineStats | None:
        """`None` if there are none to be had now."""
        ...


def check_engine(engine: object) -> None:
    """
    Raises:
        ConfigError: It lacks a part of `Engine`, which the error names.
    """
    parts = [name for name in vars(Engine) if not name.startswith("_")]
    if missing := [name for name in parts if not hasattr(engine, name)]:
        name = type(engine).__name__
        raise ConfigError(f"{name} is not an afferent.Engine: it has no {' and no '.join(missing)}")
