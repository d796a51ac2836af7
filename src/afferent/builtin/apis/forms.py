"""Structured outputs: parameters of OpenAI, Anthropic and vLLM to fields of `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from afferent.errors import InvalidForm, InvalidRequest, UnsupportedParameter
from afferent.types import MAX_FORM_NBYTES

_ANY_OBJECT: Final = Raw(b'{"type":"object"}')
_NULL: Final = (b"null", b"false")
_Kind = Annotated[str, Meta(max_length=64)]

GivenSchema = Raw | UnsetType
"""JSON schema; vLLM also accepts one in a string."""


class NamedSchema(Struct):
    """Schema with a name, which is ignored. Every schema is enforced, also without ``strict``."""

    schema: GivenSchema = UNSET
    strict: bool | None = None


class OutputFormat(Struct):
    """Response format, in each of the APIs.

    It is ``response_format``, ``text.format``, or ``output_config.format``. OpenAI's older variant
    has the schema one level deeper.
    """

    type: _Kind
    schema: GivenSchema = UNSET
    json_schema: NamedSchema | None = None
    strict: bool | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """Structured outputs of vLLM; exactly one. Its other fields are refused if they are set."""

    json: GivenSchema = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: GivenSchema = UNSET
    structural_tag: GivenSchema = UNSET
    whitespace_pattern: GivenSchema = UNSET
    disable_any_whitespace: GivenSchema = UNSET
    disable_additional_properties: GivenSchema = UNSET


class Completed(Protocol):
    """Request of OpenAI's chat completions or completions; with vLLM's older names."""

    @property
    def response_format(self) -> OutputFormat | None: ...

    @property
    def guided_json(self) -> GivenSchema: ...

    @property
    def guided_regex(self) -> str | None: ...

    @property
    def guided_choice(self) -> list[str] | None: ...


Form = Mapping[str, Any]
"""Fields of `GenerateRequest`; empty if the answer is unconstrained."""


def of_format(given: OutputFormat | None, param: str) -> Form:
    """Translate a response format.

    Args:
        param: Name of the parameter in the API.

    Raises:
        InvalidRequest: It lacks its schema.
        UnsupportedParameter: Its type is unknown.
    """
    if given is None or given.type == "text":
        return {}
    if given.type == "json_object":
        return _json(_ANY_OBJECT, param)
    if given.type != "json_schema":
        raise UnsupportedParameter(f"{param} is not supported: {given.type}", param=param)
    named = given if given.json_schema is None else given.json_schema
    if (said := _said(named.schema)) is None:
        raise InvalidRequest(f"{param} lacks a schema", param=param)
    form = _json(named.schema, param)
    if named.strict:
        try:
            check_is_closed(msgspec.json.decode(said), param)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidForm(f"{param}: the schema is not valid JSON", param=param) from error
    return form


def check_is_closed(schema: Any, param: str) -> None:
    """Check that each object of a strict schema is closed, as OpenAI's own API demands.

    Raises:
        InvalidRequest: An object of the schema may have further members.
    """
    left = [schema]
    while left:
        match left.pop():
            case {"type": "object", **others} if others.get("additionalProperties") is not False:
                members = others.get("properties")
                names = ", ".join(members) if isinstance(members, dict) else "no properties"
                raise InvalidRequest(
                    f"{param} is strict, and the schema of the object with {names[:200]} is open: "
                    "additionalProperties must be false in each object",
                    param=param,
                )
            case dict() as value:
                left += [each for name, each in value.items() if name not in _CONSTANTS]
            case list() as values:
                left += values


_CONSTANTS: Final = ("const", "enum", "default", "examples")


def of_structured_outputs(given: StructuredOutputs | None) -> Form:
    """Translate vLLM's structured outputs.

    Raises:
        InvalidRequest: It has several constraints.
        UnsupportedParameter: A constraint is not supported.
    """
    param = "structured_outputs"
    if given is None:
        return {}
    for name in (
        "grammar",
        "structural_tag",
        "whitespace_pattern",
        "disable_any_whitespace",
        "disable_additional_properties",
    ):
        if _said(getattr(given, name)) is not None:
            raise UnsupportedParameter(f"{param} is not supported: {name}", param=param)
    return one_of(
        _json(given.json, param),
        _json(_ANY_OBJECT if given.json_object else UNSET, param),
        _regex(given.regex, param),
        _choice(given.choice, param),
    )


def of_completions(given: Completed, others: Form) -> Form:
    """Translate the constraints of a chat completion or completion.

    Args:
        others: Constraints from other parameters.

    Raises:
        InvalidRequest: There are several constraints, or one is invalid.
        UnsupportedParameter: A constraint is unknown.
    """
    return one_of(
        of_format(given.response_format, "response_format"),
        others,
        _json(given.guided_json, "guided_json"),
        _regex(given.guided_regex, "guided_regex"),
        _choice(given.guided_choice, "guided_choice"),
    )


def one_of(*forms: Form) -> Form:
    """Return the only constraint, or none.

    Raises:
        InvalidRequest: There are several.
    """
    asked = [form for form in forms if form]
    if len(asked) > 1:
        names = " and ".join(dict.fromkeys(form["form_param"] for form in asked))
        raise InvalidRequest(
            f"an answer has one form, and {names} asks for several"
            if names == asked[0]["form_param"]
            else f"an answer has one form: of {names} only one can be had",
            param=asked[-1]["form_param"],
        )
    return asked[0] if asked else {}


def _said(given: GivenSchema) -> str | None:
    """Return the given JSON text; ``None`` if it is unset, null or false."""
    return None if given is UNSET or bytes(given) in _NULL else bytes(given).decode()


def _json(given: GivenSchema, param: str) -> Form:
    text = _said(given)
    if text is None:
        return {}
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    _check_size(len(text.encode()), param)
    return {"json_schema": text, "form_param": param}


def _regex(given: str | None, param: str) -> Form:
    if given is None:
        return {}
    _check_size(len(given.encode()), param)
    return {"regex": given, "form_param": param}


def _choice(given: list[str] | None, param: str) -> Form:
    if given is None:
        return {}
    if not given:
        raise InvalidForm("a choice has at least one text", param=param)
    _check_size(sum(len(text.encode()) for text in given), param)
    return {"choice": tuple(dict.fromkeys(given)), "form_param": param}


def _check_size(nbytes: int, param: str) -> None:
    if nbytes > MAX_FORM_NBYTES:
        raise InvalidForm(
            f"{param} has {nbytes} bytes, and may have {MAX_FORM_NBYTES}", param=param
        )
