"""Request of the built-in APIs, in one form for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from afferent.admission.shares import NAMELESS, Share
from afferent.items.request import DocumentPart, ItemRequest, MediaPart
from afferent.types import Modality, Placeholder, Sampling, ToolFunction

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Tool call in a message of the assistant; ``arguments`` is JSON."""

    name: str
    arguments: str


Part = TextPart | MediaPart | DocumentPart | CallPart
"""A `DocumentPart` is replaced by its pages before a prompt is made."""


@dataclass(frozen=True, slots=True)
class Message:
    """Turn of a conversation.

    Attributes:
        role: A `Role`; the renderer for vLLM takes any other, too.
        extra: Further keys of the message for the chat template, such as ``tool_calls``.
    """

    role: str
    parts: tuple[Part, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def media(self) -> list[MediaPart]:
        return [part for part in self.parts if isinstance(part, MediaPart)]


ScoredToken = msgspec.Raw
"""Token of the answer with its log-probability and alternatives, in the format of an API.

It is encoded as JSON at once: to encode all those of a long answer at its end takes a second.
"""

WriteScored = Callable[[str, float, Sequence[tuple[str, float]]], ScoredToken]
"""Encodes a token's text, its log-probability and the most likely alternatives."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Request for log-probabilities, with ``num_top`` alternatives, encoded by ``write``."""

    num_top: int
    write: WriteScored


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Options for rendering a conversation by the model's chat template.

    Attributes:
        variables: Further variables of the template; their text never becomes a special token.
        num_characters: Number of characters in them.
        begins_answer: Whether the assistant's turn begins at the end.
        continues_last: Whether the last message is left open, and the answer continues it.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    num_characters: int = 0
    begins_answer: bool = True
    continues_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools that the answer may call.

    Attributes:
        functions: The tools.
        must_call: Whether the answer consists of calls.
        is_parallel: Whether there may be several calls.
    """

    functions: tuple[ToolFunction, ...]
    must_call: bool = False
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limit on a prompt without a conversation, to which a longer one is cut.

    Attributes:
        num_tokens: Largest number of tokens; -1: as many as the model's context has.
        side: Side that is cut off; ``None``: the left one, but special tokens that the tokenizer
            adds to a text stay.
    """

    num_tokens: int
    side: Literal["left", "right"] | None = None


class SamplingWishes(Struct, frozen=True, kw_only=True):
    """Fields of `Sampling` that all APIs take by these names, with these values; ``None`` means the
    model's default.
    """

    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    ignore_eos: bool | None = None

    @property
    def wishes(self) -> dict[str, Any]:
        """These fields, by name."""
        return {name: getattr(self, name) for name in SamplingWishes.__struct_fields__}


class GenerateRequest(SamplingWishes, frozen=True, kw_only=True):
    """Request for answers; ``None`` means the model's default.

    The default of ``max_tokens`` is the rest of the context. Sampling fields have the names and
    values of `Sampling`.
    """

    request_id: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or tokens for the model, instead of messages."""
    adds_special: bool = True
    """Whether the tokenizer adds its special tokens around a text, such as one for its start."""
    truncation: Truncation | None = None
    """Limit on ``prompt``."""
    is_only_counted: bool = False
    """No answer follows: the prompt may be longer than the model's context."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    form_param: str | None = None
    """The API's parameter that requested one of these three structured outputs."""
    tool_use: ToolUse | None = None
    tools: str | None = None
    """`ToolForm` of ``tool_use`` as JSON, in the format of the model's chat template."""
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    """Whether the stop string or token that ended the answer is a part of its text."""
    skips_special: bool = True
    """Whether special tokens are removed from the answer's text."""
    template: TemplateOptions = TemplateOptions()
    n: int = 1
    """Number of answers."""
    logprobs: Logprobs | None = None
    cache_salt: str = ""
    """Salt of the prefix cache, which a rendered prompt repeats."""
    share: Share = NAMELESS
    """Tenant and weight of the request."""

    @property
    def tenant(self) -> str:
        """Name of the tenant; one tenant's cached items never hit for another."""
        return self.share.tenant

    @property
    def media(self) -> list[MediaPart]:
        """All items of all messages, in order."""
        return [part for message in self.messages for part in message.media]

    @property
    def files(self) -> list[MediaPart | DocumentPart]:
        """All items and documents of all messages, in order."""
        return [
            p for m in self.messages for p in m.parts if isinstance(p, MediaPart | DocumentPart)
        ]

    @property
    def documents(self) -> list[DocumentPart]:
        """All documents of all messages, in order."""
        return [p for m in self.messages for p in m.parts if isinstance(p, DocumentPart)]

    @property
    def items(self) -> ItemRequest:
        """The media of this request alone."""
        return ItemRequest(self.request_id, tuple(self.media), self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRules:
    """Rules by which vLLM reads a conversation, as far as a server and its model set them.

    Attributes:
        merges_system: Whether system messages within a conversation of the Messages API are moved
            to its start, since the chat template takes none elsewhere.
        excludes_unused_tools: Whether tools are left out of the prompt if ``tool_choice`` is
            ``none``.
    """

    merges_system: bool
    excludes_unused_tools: bool


_ASKED = tuple(
    name for name in Sampling.__struct_fields__ if name not in ("max_tokens", "num_logprobs")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling of the model's own generation config, for fields that the request does not set."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def apply(self, request: GenerateRequest, *, max_tokens: int) -> Sampling:
        own = {name: getattr(self, name) for name in self.__slots__}
        given = {name: getattr(request, name) for name in _ASKED}
        asked = {name: value for name, value in given.items() if value is not None}
        num_logprobs = request.logprobs.num_top if request.logprobs is not None else None
        return Sampling(max_tokens=max_tokens, num_logprobs=num_logprobs, **(own | asked))


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt whose KV cache was there already."""


class RenderedItem(Struct, frozen=True):
    """Item in a rendered prompt.

    ``key`` is the features' content key in hexadecimal, for a look-up in the store. ``hash`` is the
    name in an engine's caches. ``placeholder`` is the range of its embeddings, ``span`` of all of
    its tokens. ``features_nbytes`` is the size of the features, if they were requested.
    """

    modality: Modality
    key: str
    hash: str
    placeholder: Placeholder
    span: Placeholder
    features_nbytes: int | None = None


class Rendered(Struct, frozen=True):
    """Prompt as the engine gets it."""

    token_ids: list[int]
    items: list[RenderedItem]
    max_model_len: int = 0
    text: str = ""
    """Text of a prompt that was given as tokens."""
    cache_salt: str = ""
    """Salt of the prefix cache, as the request gave it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Next piece of an answer, and its tokens if log-probabilities were requested."""

    text: str
    index: int = 0
    """Index among the ``n`` answers."""
    logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer; ``stop`` is the stop string or the requested stop token that was met."""

    reason: Literal["stop", "length"]
    usage: Usage
    index: int = 0
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Media of the prompt, in order, and its length; sent before the first text."""

    digests: tuple[bytes, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Piece of a tool call.

    Attributes:
        index: Number of the answer.
        number: Number of the call in the answer.
        name: Name of the tool, in the first piece of a call; then ``None``.
        arguments: Next piece of the arguments' JSON.
    """

    index: int
    number: int
    name: str | None = None
    arguments: str = ""


Output = PromptInfo | TextDelta | CallDelta | End
