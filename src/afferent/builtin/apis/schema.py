"""Decoding of a request's JSON by a schema, common to all APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType, structs

from afferent.builtin.apis import forms
from afferent.builtin.apis.names import ParameterNames
from afferent.builtin.apis.wording import Bounds, bounds_of, in_words
from afferent.builtin.pipeline.call import ModelNames
from afferent.builtin.pipeline.request import Message, SamplingWishes
from afferent.errors import InvalidRequest, ModelNotFound, Param
from afferent.media.body.raw import RawMedia
from afferent.types import Bias, TokenId

T = TypeVar("T")
Request = TypeVar("Request", bound="AnyRequest")

Name = Annotated[str, Meta(max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class AnyRequest(SamplingWishes, frozen=True, kw_only=True):
    """Fields common to requests of all APIs. Parameters without a field are checked by name."""

    model: Name
    stream: bool | None = False
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: forms.StructuredOutputs | None = None

    def form(self) -> forms.Form:
        """Return the structured output constraint.

        Raises:
            InvalidRequest: There are several, or one is invalid.
            UnsupportedParameter: It is not supported.
        """
        return forms.of_structured_outputs(self.structured_outputs)


class ConversationRequest(AnyRequest, frozen=True, kw_only=True):
    """Request with messages, which the model's chat template renders."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Reader(Generic[Request]):
    """Reader of one API's requests."""

    def __init__(self, request_type: type[Request], names: str) -> None:
        """Create it.

        Args:
            names: API with the known parameters.
        """
        self.request_type = request_type
        self._decoder = msgspec.json.Decoder(request_type)
        self._bounds = bounds_of(request_type)
        self._names = ParameterNames(names)

    def read(
        self, text: bytes, *, served: ModelNames, refuses_unknown: bool
    ) -> tuple[Request, tuple[str, ...]]:
        """Return the request, and the names of the ignored parameters.

        Its ``model`` is replaced by the model's first name, as in answers.

        Args:
            served: Name or names of the model.
            refuses_unknown: Refuse unknown parameters instead of ignoring them.

        Raises:
            InvalidRequest: It is not of the schema, or has an unknown parameter.
            ModelNotFound: The request names another model.
            UnsupportedParameter: An unsupported parameter has a value with an effect.
        """
        request = decode(self._decoder, text, None, self._bounds)
        request = structs.replace(request, model=check_model(request.model, served))
        given = decode(_names_decoder, text, None)
        return request, self._names.check(given, refuses_unknown=refuses_unknown)


def check_model(asked: str, served: ModelNames) -> str:
    """Return the model's first name.

    Raises:
        ModelNotFound: The request names another model.
    """
    names = (served,) if isinstance(served, str) else served
    if asked not in names:
        raise model_not_found(asked, names)
    return names[0]


def model_not_found(asked: str, names: Sequence[str]) -> ModelNotFound:
    """Return the error for a name that is none of the model's."""
    known = " or ".join(map(repr, names))
    return ModelNotFound(f"the model {asked!r} is not served here: {known} is", param="model")


_names_decoder = msgspec.json.Decoder(dict[str, Raw])


def read_part(
    decoder: msgspec.json.Decoder[T], part: msgspec.Raw | UnsetType, param: str
) -> T | None:
    """Decode a part of a request that is parsed only if it has a meaning.

    Raises:
        InvalidRequest: It is not of the schema.
    """
    return None if part is UNSET else decode(decoder, part, param)


def decode(
    decoder: msgspec.json.Decoder[T],
    text: bytes | msgspec.Raw,
    param: str | None,
    bounds: Bounds | None = None,
) -> T:
    """Decode JSON by a schema.

    Raises:
        InvalidRequest: It is not JSON, or not of the schema; the message says where.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        wrong = in_words(error, decoder.type, bounds or {}, within=param or "")
        raise InvalidRequest(wrong.message, param=param or wrong.param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON", param=param) from error


def check_parts(messages: Sequence[Message], most: int) -> None:
    """Check the number of parts; a message without any counts as one.

    Raises:
        InvalidRequest: There are more than ``most``.
    """
    number = sum(max(1, len(message.parts)) for message in messages)
    if number > most:
        raise InvalidRequest(
            f"the messages have {number} parts; at most {most} are accepted (--max-parts)",
            param=Param.MESSAGES,
        )


def check_all_taken(media: Mapping[str, RawMedia], param: str) -> None:
    """Check that all media of the body were used.

    Raises:
        InvalidRequest: Some media are at places that the API does not define.
    """
    if media:
        raise InvalidRequest("there are media where the API expects none", param=param)
