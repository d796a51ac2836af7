"""Requests for a prompt: the part that is common to all APIs.

Parameters that do not change the prompt are ignored, also those that an answer would need. vLLM
ignores unknown parameters, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from afferent.builtin.apis import schema
from afferent.builtin.apis.asking import check_variables, text_sizes
from afferent.builtin.apis.rendering.vllm_turns import Turn, messages_of
from afferent.builtin.pipeline.call import ModelNames
from afferent.builtin.pipeline.request import (
    GenerateRequest,
    Message,
    TemplateOptions,
    Truncation,
    VllmRules,
)
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody

_OF_REQUEST: Final = ("add_generation_prompt", "continue_final_message")
"""Variables that the request itself sets, also against ``chat_template_kwargs``."""
_UNSET: Final = (None, "auto")
_MAX_DEPTH: Final = 64

Tools = list[dict[str, Any]]
"""Tools for the chat template, each with a ``type`` and a ``function``."""


class Conversation(Struct, frozen=True, kw_only=True):
    """Conversation of a request, for the chat template.

    Attributes:
        turns: Messages in the format of chat completions.
        tools: ``None`` for none; an empty list is another value for a template.
        effort: Reasoning effort of the model.
    """

    turns: Sequence[Turn]
    tools: Tools | None = None
    documents: list[dict[str, str]] | None = None
    effort: str | None = None
    begins_answer: bool = True
    continues_last: bool = False


class Texts(Struct, frozen=True, kw_only=True):
    """Prompts of a request without a conversation.

    Attributes:
        prompts: Text or tokens of each.
        adds_special: Whether the tokenizer adds its special tokens around texts.
        truncation: Limit on each.
    """

    prompts: Sequence[str | tuple[int, ...]]
    adds_special: bool = True
    truncation: Truncation | None = None


class PromptRequest(Struct, kw_only=True):
    """Fields common to all APIs.

    Attributes:
        unsupported: Parameters that would change the prompt, and the values that do not.
    """

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}

    model: schema.Name
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None

    @property
    def answer_tokens(self) -> int | None:
        """Largest number of tokens in the answer, which counts against the model's context."""
        return None

    def content(self, media: Mapping[str, RawMedia], rules: VllmRules) -> Conversation | Texts:
        """Return the conversation, or texts or tokens that are whole prompts.

        Args:
            media: Media of the body, by the marker in the JSON at their place.
            rules: Rules that the server and its model set.

        Raises:
            InvalidRequest: A message or the prompt is invalid.
            UnsupportedParameter: It contains something that is not supported.
        """
        raise NotImplementedError


T = TypeVar("T", bound=PromptRequest)


class PromptReader(Generic[T]):
    """Reader of one API's requests for a prompt."""

    def __init__(self, request_type: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(request_type)
        self._unsupported = request_type.unsupported

    def read(
        self, body: ReceivedBody, *, request_id: str, served: ModelNames, rules: VllmRules
    ) -> list[GenerateRequest]:
        """Return the request for each prompt, of which there is at least one.

        Args:
            served: Name or names of the model.

        Raises:
            InvalidRequest: It is not of the schema.
            ModelNotFound: The request names another model.
            UnsupportedParameter: A parameter would change the prompt, and is not supported.
        """
        request = schema.decode(self._decoder, body.json, None)
        schema.check_model(request.model, served)
        self._check_unsupported(body.json)
        media = dict(body.media)
        generate = GenerateRequest(
            request_id=request_id,
            max_tokens=request.answer_tokens,
            cache_salt=request.cache_salt or "",
        )
        try:
            requests = _with_content(generate, request, media, rules)
        except RecursionError as error:
            raise InvalidRequest(
                f"a value of the request is nested more than {_MAX_DEPTH} deep"
            ) from error
        schema.check_all_taken(media, "messages")
        return requests

    def _check_unsupported(self, text: bytes) -> None:
        given = schema.decode(_names_decoder, text, None)
        for name in given.keys() & self._unsupported.keys():
            value = msgspec.json.decode(given[name])
            if value is not None and value not in self._unsupported[name]:
                raise UnsupportedParameter(
                    f"{name} is not supported: prompts are those of the server's own settings",
                    param=name,
                )


def _with_content(
    generate: GenerateRequest, request: PromptRequest, media: dict[str, RawMedia], rules: VllmRules
) -> list[GenerateRequest]:
    """Add the conversation or the prompts; media of the messages are removed from ``media``."""
    found = request.content(media, rules)
    if isinstance(found, Texts):
        own = {"adds_special": found.adds_special, "truncation": found.truncation}
        return [structs.replace(generate, prompt=each, **own) for each in found.prompts]
    messages = messages_of(found.turns, media)
    options = _options(found, request.chat_template_kwargs or {}, messages)
    return [structs.replace(generate, messages=messages, template=options)]


_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _options(
    found: Conversation, given: Mapping[str, Any], messages: Sequence[Message]
) -> TemplateOptions:
    """Return the options of the chat template, in vLLM's order of precedence.

    Args:
        given: ``chat_template_kwargs`` of the request.
        messages: Messages, whose further keys are text of the prompt, too.
    """
    if found.continues_last and found.begins_answer:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false",
            param="continue_final_message",
        )
    own = {name: value for name, value in given.items() if name not in _OF_REQUEST}
    num_characters = check_variables(own)
    variables = {name: value for name, value in own.items() if value not in _UNSET}
    if found.tools is not None:
        variables = {"tools": found.tools, **variables}
    if found.documents is not None:
        variables["documents"] = found.documents
    if found.effort not in _UNSET:
        variables["reasoning_effort"] = found.effort
        if "enable_thinking" not in own:
            variables["enable_thinking"] = found.effort != "none"
    long = [found.tools, found.documents, [dict(message.extra) for message in messages]]
    num_characters += sum(text_sizes(long, _MAX_DEPTH, "tools"))
    return TemplateOptions(
        variables=variables,
        num_characters=num_characters,
        begins_answer=found.begins_answer,
        continues_last=found.continues_last,
    )


Turns = Annotated[list[Turn], Meta(min_length=1)]
