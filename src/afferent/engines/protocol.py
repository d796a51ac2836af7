"""Interface of an engine behind Afferent's frontends.

A request arrives as token ids and `Item`s: handles of sealed features, with the placeholder that
each one fills. The engine pins the handles under its own connection to the store and sends
`Accepted`; from then on the frontend pins nothing for the request. `docs/writing-an-engine.md`
describes how to write an engine; `afferent.conformance.engine` tests one.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Final, Literal, Protocol, get_args, runtime_checkable

import msgspec
from msgspec import Meta, Struct

from afferent.admission.shares import NAMELESS, Share
from afferent.errors import ConfigError
from afferent.types import Item, Modality, NonNegative, RequestId, Sampling, Span, TokenLogprobs


class EngineRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request to an engine.

    Attributes:
        request_id: An id that is used once; only a refused request may come again under its own.
        token_ids: The prompt, with a token in each position that an item fills.
        items: The items in prompt order.
        sampling: How the answer's tokens are chosen.
        share: The tenant and its weight, for an engine that divides its steps fairly; with
            `afferent.schedule.Scheduler` the engine passes it on.
        answer_of: The request that this one answers, where several answer one (``n`` above 1): an
            engine that divides its steps fairly counts them as one. Empty: it stands alone.
        num_answers: How many requests have this ``answer_of``; 1 where it is empty.
        session_id: The session whose sequence this request extends; empty: it is a sequence of its
            own. One request of a session runs at a time.
        start: The number of tokens that the session's sequence has: earlier prompts, answers, and
            the tokens that ended them. ``token_ids`` come behind these, and placeholders count from
            the first of ``token_ids``. 0 begins the sequence, again if there is one.
        has_answer: Whether an answer is requested; without one, the request has finished once its
            prompt is computed.
        mark: The frontend's own note about the session's sequence when this request has finished,
            for `SessionEngine.find_session`.
    """

    request_id: RequestId
    token_ids: Annotated[list[NonNegative], Meta(min_length=1)]
    items: list[Item]
    sampling: Sampling
    share: Share = NAMELESS
    answer_of: str = ""
    num_answers: int = 1
    session_id: str = ""
    start: NonNegative = 0
    has_answer: bool = True
    mark: Annotated[bytes, Meta(max_length=1024)] = b""


class KeptSession(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sequence of a session between its requests.

    Attributes:
        num_tokens: Number of its tokens: the ``start`` of the next request.
        mark: Of the request that finished last.
        end_token: The token that ended the answer to that request, if one did.
    """

    num_tokens: NonNegative
    mark: bytes
    end_token: NonNegative | None = None


class Accepted(Struct, frozen=True):
    """The engine has its own pins now."""


class Tokens(Struct, frozen=True):
    """Next tokens of the answer.

    Attributes:
        token_ids: At least one token.
        spans: New spans of the request's trace; may be empty.
        logprobs: An entry for each token if the request asked for them, and none otherwise.
        num_cached: In the first event after `Accepted`: the number of the prompt's tokens whose KV
            cache was there already.
    """

    token_ids: list[int]
    spans: list[Span]
    logprobs: list[TokenLogprobs] = []
    num_cached: int = 0


class Finished(Struct, frozen=True):
    """End of the answer.

    Attributes:
        reason: ``stop`` after a token that ends the answer, ``length`` after ``max_tokens``.
        spans: The rest of the request's trace; may be empty.
        token_id: The token that ended the answer, which `Tokens` never contain; ``None``: no such
            token, or not reported.
        num_cached: As in `Tokens`.
    """

    reason: Literal["stop", "length"]
    spans: list[Span]
    token_id: int | None = None
    num_cached: int = 0


EngineEvent = Accepted | Tokens | Finished


class Chosen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Token that a step chose for a sequence."""

    sequence_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None = None


SamplingField = Literal["temperature", "top_p", "top_k", "seed", "num_logprobs"]
"""Fields that an engine supports unless its `EngineInfo` lists them as unsupported."""

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
    "tools",
]
"""Fields that an engine supports only if its `EngineInfo` lists them."""


class EngineInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Properties of the engine's model that frontends need. A value that frontends could not decode
    raises a `ConfigError` in the constructor.

    Attributes:
        max_model_len: Most tokens of a prompt and its answer.
        eos_token_ids: Tokens that end an answer.
        embed_nbytes: Bytes of one row of embeddings, all its layers together.
        can_split_items: Whether a chunk of prompt may end inside an item; not where an item attends
            to itself.
        cross_attention: An encoder-decoder model: its items are beside the prompt, at offset 0.
        kv_token_nbytes: This machine's memory that a token of a running request may take, in all
            workers together; 0: none, or unknown.
        modalities: Modalities of its items, among those of the model's family.
        unsupported: Fields of `Sampling` that it does not support: ``temperature``, ``top_p``,
            ``top_k``, ``seed``, ``num_logprobs``. Frontends refuse requests that use them, so that
            it never gets one.
        supported: Further fields of `Sampling` that it supports: ``min_p``, ``repetition_penalty``,
            ``frequency_penalty``, ``presence_penalty``, ``logit_bias``, ``min_tokens``,
            ``stop_token_ids``, ``json_schema``, ``regex``, ``choice``. Requests that use others are
            refused likewise.
        vocab_size: Number of tokens that the model chooses from; larger ids are refused. 0:
            unknown.
        generates: Whether it takes requests. If not, prompts are rendered, and no model runs.
        has_sessions: Whether it is a `SessionEngine`: requests may have a ``session_id``.
        num_kept_tokens: Most tokens of requests that have ended whose KV cache stays for prompts
            that begin alike; ``num_cached`` is reported for these. Shorter beginnings of a prompt
            come as requests for one token, while the rest of the prompt's items is made. 0: none
            come.
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
    generates: bool = True
    has_sessions: bool = False
    num_kept_tokens: int = 0

    @property
    def lacking(self) -> tuple[str, ...]:
        """Return all fields of `Sampling` that it does not support."""
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


@functools.cache  # `fields` evaluates every annotation at each call
def _info_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(EngineInfo)


class EngineStats(Struct, array_like=True, forbid_unknown_fields=True):
    """Counts of an engine since its start, and its current state.

    Attributes:
        num_waiting: Requests that wait to be run.
        num_running: Requests that take part in steps.
        num_steps: Steps.
        num_prompt_tokens: Positions computed in chunks, after a preemption again.
        num_decode_tokens: Computed positions of answers.
        num_cached_tokens: Positions of prompts taken from the KV cache of earlier requests.
        num_preempted: Requests that had to begin again for lack of space.
        num_restarts: Number of times that workers were lost.
        num_embeddings_found: Items whose embeddings were in the store.
        num_encoded: Items that each worker has encoded, by rank.
        cache_nbytes: Bytes of embeddings in each worker's cache.
        kv_in_use: Part of the KV cache in use, 0 to 1.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted: int = 0
    num_restarts: int = 0
    num_embeddings_found: int = 0
    num_encoded: list[int] = []
    cache_nbytes: int = 0
    kv_in_use: float = 0.0


class Engine(Protocol):
    """Engine as a frontend sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """`None` while the engine can't take requests."""

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request: yield `Accepted` once, then `Tokens`, then `Finished`.

        Closing the iterator early aborts the request. However a request ends, the engine releases
        all its pins and memory. The token that ends an answer is not among its tokens, unless
        ``ignore_eos`` continues the answer; `Finished` may report it.

        Raises:
            EngineUnavailable: The engine is not running, or went away (any `Unavailable` may be
                raised); retryable.
            InvalidPlaceholders: They overlap, are not in order, or lie outside of the prompt.
            UnsupportedParameter: The engine does not support a field of the sampling.
            InvalidForm: The response format is impossible; also later, when an answer becomes too
                expensive to continue.
            StaleHandle: An item's features are gone.
            StoreRestarted: They were lost when the store restarted.
            SessionLost: The request extends a session that the engine does not have, or not with so
                many tokens: begin it again.
        """
        ...

    async def stats(self) -> EngineStats | None:
        """Return the statistics; `None` if there are none now."""
        ...


Submit = Callable[[EngineRequest], AsyncGenerator[EngineEvent, None]]
"""`Engine.submit`, or a function that adds something to it."""


@runtime_checkable
class SessionEngine(Engine, Protocol):
    """Engine whose requests may extend the sequence of a session, which stays between them."""

    def end_session(self, session_id: str) -> None:
        """Release a session's sequence; unknown ones are ignored.

        An engine may do so by itself, if it needs the memory: the next request of the session
        raises `SessionLost`. It is called when the client or the frontend is gone, and may keep the
        sequence for some time, for a client that comes back.
        """
        ...

    async def find_session(self, session_id: str) -> KeptSession | None:
        """Return a session's sequence that the engine has, so that any frontend can extend it.

        ``None``: it has none, or a request extends it.
        """
        ...


def check_engine(engine: object) -> None:
    """Check that an object has all parts of `Engine`.

    Raises:
        ConfigError: It lacks a part of `Engine`, which the error names.
    """
    parts = [name for name in vars(Engine) if not name.startswith("_")]
    if missing := [name for name in parts if not hasattr(engine, name)]:
        name = type(engine).__name__
        raise ConfigError(f"{name} is not an afferent.Engine: it has no {' and no '.join(missing)}")
