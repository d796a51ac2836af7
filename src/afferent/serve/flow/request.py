"""A request in our own words, whichever API it came by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from afferent.ingest.raw import RawMedia
from afferent.quota.shares import NAMELESS, Share
from afferent.types import Modality, Placeholder, Sampling

Role = Literal["system", "user", "assistant", "tool"]
Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class SeenMedia:
    """An item whose features were made before, known by the digest of its encoded bytes."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio clip or video: as it came in the body, or by URL."""

    modality: Modality
    source: str | RawMedia | SeenMedia | None
    """``None``: an item seen before, known by its ``uuid``."""
    detail: Detail = "auto"
    uuid: str | None = None
    max_pixels: int = 0
    """Most pixels that are made of an image, if that is less than the model's own; 0: not said."""


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]


ScoredToken = msgspec.Raw
"""A token of the answer, its log-probability, and the likeliest instead, as an API writes them.

It is JSON from the start: to write all those of a long answer at its end takes a second.
"""

WriteScored = Callable[[str, float, Sequence[tuple[str, float]]], ScoredToken]
"""Write a token's text, its log-probability, and the likeliest instead."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities are asked for: those of ``num_top`` other tokens, too, to be written so."""

    num_top: int
    write: WriteScored


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """How the model's chat template is asked to write a conversation.

    Attributes:
        variables: What the template gets besides; their text never becomes a special token.
        num_characters: How much text they are.
        begins_answer: The assistant's turn is begun at the end.
        continues_last: The last message is left open, and the answer goes on with it.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    num_characters: int = 0
    begins_answer: bool = True
    continues_last: bool = False


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """``None`` is what was not said: the model's own default then holds, of ``max_tokens`` as many
    as it has room for. Of how tokens are chosen, names and values are those of `Sampling`.
    """

    request_id: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Instead of messages: a text or its tokens, as the model gets them."""
    adds_special: bool = True
    """The tokenizer writes its own special tokens around a text, such as one for its begin."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    form_param: str | None = None
    """Which of the API's parameters asked for one of these three forms."""
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    """What ended the answer, a stop string or a token, is a part of its text."""
    skips_special: bool = True
    """Special tokens of the answer are no text."""
    template: TemplateOptions = TemplateOptions()
    n: int = 1
    """How many answers."""
    logprobs: Logprobs | None = None
    share: Share = NAMELESS
    """Whose request it is."""

    @property
    def tenant(self) -> str:
        """What one tenant has cached, no other can hit."""
        return self.share.tenant

    @property
    def media(self) -> list[MediaPart]:
        """All items of all messages, in order."""
        return [p for m in self.messages for p in m.parts if isinstance(p, MediaPart)]


_ASKED = tuple(
    name for name in Sampling.__struct_fields__ if name not in ("max_tokens", "num_logprobs")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the model's own generation config says where the request says nothing."""

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


class RenderedItem(Struct, frozen=True):
    """Where an item stands in a prompt, and what it is.

    ``key`` is the features' content key in hexadecimal: who may look into the store finds them by
    it. ``features_nbytes`` is how large they are, if they were to be made.
    """

    modality: Modality
    key: str
    placeholder: Placeholder
    features_nbytes: int | None = None


class Rendered(Struct, frozen=True):
    """A prompt as the engine gets it."""

    token_ids: list[int]
    items: list[RenderedItem]
    max_model_len: int = 0
    text: str = ""
    """What was given as tokens."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of an answer, and its tokens if log-probabilities were asked for."""

    text: str
    index: int = 0
    """Of which of the ``n`` answers."""
    logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """``stop`` is the stop string that was met, or the token that the request named, if one was."""

    reason: Literal["stop", "length"]
    usage: Usage
    index: int = 0
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Which media the prompt holds, in order, and its length; said before the first text."""

    digests: tuple[bytes, ...]
    num_prompt_tokens: int


Output = PromptInfo | TextDelta | End
