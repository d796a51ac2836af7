"""Common part of all APIs: their base class, and the translation of the shared parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

from msgspec import structs

from afferent.builtin.apis.api import Lookup, TokenCount
from afferent.builtin.apis.schema import AnyRequest, ConversationRequest, Reader, Request
from afferent.builtin.pipeline.call import Call, ModelNames
from afferent.builtin.pipeline.chat_template import RESERVED_NAMES
from afferent.builtin.pipeline.request import GenerateRequest, TemplateOptions, TextPart
from afferent.errors import AfferentError, InvalidRequest, Param
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import Dialect

_MAX_VARIABLES = 64
_MAX_CHARACTERS = 16_384
_MAX_DEPTH = 8
_WHERE = "chat_template_kwargs"


class BuiltinApi(ABC, Generic[Request]):
    """Base class of the built-in APIs, an implementation of `Api`.

    Attributes:
        dialect: Name, path, request ids, key header and error format.
        reader: Schema and known parameters.
    """

    dialect: Dialect
    reader: Reader[Request]
    example: Mapping[str, Any]
    media_keys: MediaKeys
    besides: Sequence[TokenCount | Lookup] = ()

    def __init__(self) -> None:
        self.name, self.path = self.dialect.name, self.dialect.path
        self.id_prefix, self.key_header = self.dialect.id_prefix, self.dialect.key_header
        self.request_type = self.reader.request_type

    def parse(
        self,
        body: ReceivedBody,
        *,
        request_id: str,
        model: ModelNames,
        refuses_unknown: bool = False,
    ) -> Call:
        request, ignored = self.reader.read(
            body.json, served=model, refuses_unknown=refuses_unknown
        )
        call = self.translate(request, body, request_id)
        return replace(call, ignored=ignored) if ignored else call

    @abstractmethod
    def translate(self, request: Request, body: ReceivedBody, request_id: str, /) -> Call:
        """Translate a request of the schema.

        Args:
            body: Body with the media that the request refers to.

        Raises:
            InvalidRequest: Parameters are invalid or mutually exclusive.
            UnsupportedParameter: A parameter has a value that is not supported.
        """

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        return self.dialect.error_body(error, request_id)


def with_parameters(generate: GenerateRequest, request: AnyRequest) -> GenerateRequest:
    """Add the sampling, response format and stops, as far as all APIs share them.

    Raises:
        InvalidRequest: The response format is invalid.
        UnsupportedParameter: The response format is not supported.
    """
    bias = request.logit_bias
    stop_ids = request.stop_token_ids
    return structs.replace(
        generate,
        **request.wishes,
        top_k=None if request.top_k is None else max(0, request.top_k),
        logit_bias=None if bias is None else tuple(bias.items()),
        stop_token_ids=None if stop_ids is None else tuple(dict.fromkeys(stop_ids)),
        includes_stop=bool(request.include_stop_str_in_output),
        skips_special=request.skip_special_tokens is not False,
        **request.form(),
    )


def with_template(
    generate: GenerateRequest,
    request: ConversationRequest,
    *,
    continues: bool = False,
    effort: str | None = None,
) -> GenerateRequest:
    """Add the options of the chat template.

    Args:
        generate: Request with its messages.
        continues: Whether the answer continues the last message, if the request does not say.
        effort: Reasoning effort of the model: a variable for the chat template.

    Raises:
        InvalidRequest: Options are mutually exclusive, or do not fit the messages.
    """
    variables = request.chat_template_kwargs or {}
    if effort is not None:
        variables = {"reasoning_effort": effort, **variables}
    begins, wish = request.add_generation_prompt, request.continue_final_message
    goes_on = continues if wish is None else wish
    if goes_on and begins:
        raise InvalidRequest(
            "an answer goes on with the last message, or begins one of its own: of "
            "continue_final_message and add_generation_prompt only one can be true",
            param="continue_final_message",
        )
    if goes_on:
        _check_end(generate)
    template = TemplateOptions(
        variables=variables,
        num_characters=check_variables(variables),
        begins_answer=not goes_on and begins is not False,
        continues_last=goes_on,
    )
    return structs.replace(generate, template=template)


def _check_end(generate: GenerateRequest) -> None:
    last = next(reversed(generate.messages), None)
    if last is None:
        why = "there is no message"
    elif last.role != "assistant":
        why = f"the last message is the {last.role}'s, and not the assistant's"
    elif not last.parts or not isinstance(last.parts[-1], TextPart):
        why = "the last message does not end with text"
    else:
        return
    raise InvalidRequest(f"there is nothing to go on with: {why}", param=Param.MESSAGES)


def check_variables(variables: Mapping[str, Any]) -> int:
    """Return the number of characters in the variables.

    Raises:
        InvalidRequest: There are too many, they are too long, or a client may not set one.
    """
    for name in variables:
        if name in RESERVED_NAMES:
            raise InvalidRequest(f"{name} is not set by {_WHERE}", param=_WHERE)
    if len(variables) > _MAX_VARIABLES:
        raise InvalidRequest(f"{_WHERE} has more than {_MAX_VARIABLES} names", param=_WHERE)
    num_characters = sum(text_sizes(variables, _MAX_DEPTH, _WHERE))
    if num_characters > _MAX_CHARACTERS:
        raise InvalidRequest(f"{_WHERE} has more than {_MAX_CHARACTERS} characters", param=_WHERE)
    return num_characters


def text_sizes(value: Any, max_depth: int, where: str) -> Iterator[int]:
    """Yield the number of characters of each text and number.

    Args:
        max_depth: Maximum of nested objects and lists.
        where: Parameter with the value.

    Raises:
        InvalidRequest: The value is nested deeper.
    """

    def sizes(value: Any, depth: int) -> Iterator[int]:
        if depth == 0:
            raise InvalidRequest(f"{where} is nested more than {max_depth} deep", param=where)
        match value:
            case Mapping():
                for name, each in value.items():
                    yield len(name)
                    yield from sizes(each, depth - 1)
            case list():
                yield len(value)
                for each in value:
                    yield from sizes(each, depth - 1)
            case str():
                yield len(value)
            case _:
                yield len(str(value))

    return sizes(value, max_depth)
