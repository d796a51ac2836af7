"""Reading a request's JSON by a schema; what all APIs do alike.

Unknown keys are refused, not dropped: a misspelt ``max_token`` must not become a long answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from afferent.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from afferent.ingest.raw import RawMedia

T = TypeVar("T")

NoOpValues = Mapping[str, tuple[Any, ...]]
"""Parameters that are accepted with these values, which change nothing, and refused with others."""

MAX_PARTS = 4096

Name = Annotated[str, Meta(max_length=256)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class AnyRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What requests of all APIs have, also those that only count tokens."""

    model: Name
    # Accepted with a no-op value only.
    tool_choice: Any = UNSET
    tools: Any = UNSET


Request = TypeVar("Request", bound=AnyRequest)


def read(
    decoder: msgspec.json.Decoder[Request], text: bytes, *, served: str, no_ops: NoOpValues
) -> Request:
    """
    Args:
        served: The model's name.

    Raises:
        InvalidRequest: It is not of the schema.
        ModelNotFound: Another model is asked for.
        UnsupportedParameter: A parameter that is not served has a value that is no no-op.
    """
    request = _decode(decoder, text, None)
    if request.model != served:
        raise ModelNotFound(f"the model {request.model!r} is not served here", param="model")
    for name, values in no_ops.items():
        value = getattr(request, name)
        if value is not UNSET and value is not None and value not in values:
            raise UnsupportedParameter(f"{name} is not supported", param=name)
    return request


def read_part(
    decoder: msgspec.json.Decoder[T], part: msgspec.Raw | UnsetType, param: str
) -> T | None:
    """A part of a request that is looked into only where it means something.

    Raises:
        InvalidRequest: It is not of the schema.
    """
    return None if part is UNSET else _decode(decoder, part, param)


def _decode(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, param: str | None) -> T:
    """
    Raises:
        InvalidRequest: It is not JSON, or not of the schema; the message says where.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON", param=param) from error


def check_all_taken(media: Mapping[str, RawMedia], param: str) -> None:
    """
    Raises:
        InvalidRequest: Of the media that were cut out of the body, some stand nowhere.
    """
    if media:
        raise InvalidRequest("there are media where the API expects none", param=param)
