"""Reading a request's JSON by a schema; what all APIs do alike.

Unknown keys are refused, not dropped: a misspelt ``max_token`` must not become a long answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta

from afferent.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from afferent.ingest.raw import RawMedia

T = TypeVar("T")

Neutral = Mapping[str, tuple[Any, ...]]
"""Parameters that are accepted with these values, which change nothing, and refused with others."""

MAX_PARTS = 4096

Name = Annotated[str, Meta(max_length=256)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


def decode(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, param: str = "") -> T:
    """
    Args:
        param: The part of the request that ``text`` is, if it is not all of it.

    Raises:
        InvalidRequest: It is not JSON, or not of the schema; the message says where.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON", param=param or None) from error


def check_model(asked: str, served: str) -> None:
    """Raises: ModelNotFound: They differ."""
    if asked != served:
        raise ModelNotFound(f"the model {asked!r} is not served here", param="model")


def check_neutral(request: object, neutral: Neutral) -> None:
    """
    Raises:
        UnsupportedParameter: One has a value that is not neutral.
    """
    for name, values in neutral.items():
        value = getattr(request, name)
        if value is not UNSET and value is not None and value not in values:
            raise UnsupportedParameter(f"{name} is not supported", param=name)


def check_all_taken(media: Mapping[str, RawMedia], param: str) -> None:
    """
    Raises:
        InvalidRequest: Of the media that were cut out of the body, some stand nowhere.
    """
    if media:
        raise InvalidRequest("there are media where the API expects none", param=param)
