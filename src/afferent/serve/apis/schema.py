"""Reading a request's JSON by a schema; what all APIs do alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from afferent.errors import InvalidRequest, ModelNotFound
from afferent.ingest.raw import RawMedia
from afferent.serve.apis import forms
from afferent.serve.apis.names import ParameterNames
from afferent.serve.apis.wording import Bounds, bounds_of, in_words
from afferent.serve.flow.call import ModelNames
from afferent.types import Bias, TokenId

T = TypeVar("T")
Request = TypeVar("Request", bound="AnyRequest")

MAX_PARTS = 4096

Name = Annotated[str, Meta(max_length=256)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class AnyRequest(Struct, kw_only=True):
    """What requests of all APIs have. What has no field here is checked by its name alone."""

    model: Name
    stream: bool | None = False
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: forms.StructuredOutputs | None = None

    def form(self) -> forms.Form:
        """Which form the answer is to have.

        Raises:
            InvalidRequest: It asks for several, or for one that can't be.
            UnsupportedParameter: It asks for what is not done here.
        """
        return forms.of_structured_outputs(self.structured_outputs)


class ConversationRequest(AnyRequest, kw_only=True):
    """With messages, which the model's chat template writes."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Reader(Generic[Request]):
    """Reads the requests of one API."""

    def __init__(self, request_type: type[Request], names: str) -> None:
        """
        Args:
            names: The API whose parameters they have.
        """
        self._decoder = msgspec.json.Decoder(request_type)
        self._bounds = bounds_of(request_type)
        self._names = ParameterNames(names)

    def read(
        self, text: bytes, *, served: ModelNames, refuses_unknown: bool
    ) -> tuple[Request, tuple[str, ...]]:
        """The request, and the names of the parameters that were ignored.

        Its ``model`` is the model's first name from now on, as answers have it.

        Args:
            served: The model's name, or its names.
            refuses_unknown: None is ignored because nobody knows it.

        Raises:
            InvalidRequest: It is not of the schema, or has a parameter that nobody knows.
            ModelNotFound: Another model is asked for.
            UnsupportedParameter: A parameter that is not served has a value that is no no-op.
        """
        request = _decode(self._decoder, text, None, self._bounds)
        names = (served,) if isinstance(served, str) else served
        if request.model not in names:
            raise model_not_found(request.model, names)
        request.model = names[0]
        given = _decode(_names_decoder, text, None)
        return request, self._names.check(given, refuses_unknown=refuses_unknown)


def model_not_found(asked: str, names: Sequence[str]) -> ModelNotFound:
    """Return the error for a name that is none of the model's."""
    known = " or ".join(map(repr, names))
    return ModelNotFound(f"the model {asked!r} is not served here: {known} is", param="model")


_names_decoder = msgspec.json.Decoder(dict[str, Raw])


def read_part(
    decoder: msgspec.json.Decoder[T], part: msgspec.Raw | UnsetType, param: str
) -> T | None:
    """A part of a request that is looked into only where it means something.

    Raises:
        InvalidRequest: It is not of the schema.
    """
    return None if part is UNSET else _decode(decoder, part, param)


def _decode(
    decoder: msgspec.json.Decoder[T],
    text: bytes | msgspec.Raw,
    param: str | None,
    bounds: Bounds | None = None,
) -> T:
    """
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


def check_all_taken(media: Mapping[str, RawMedia], param: str) -> None:
    """
    Raises:
        InvalidRequest: Of the media that were cut out of the body, some stand nowhere.
    """
    if media:
        raise InvalidRequest("there are media where the API expects none", param=param)
