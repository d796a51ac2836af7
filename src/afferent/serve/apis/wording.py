"""What is wrong with a request, in words for people: from what the schema's checks say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from afferent.errors import InvalidRequest

Bounds = Mapping[str, tuple[float, float]]
"""The least and the greatest value of parameters that have both."""

_PLACE = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)
_KINDS: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "null",
    "object": "an object",
    "str": "text",
}
_COMPARED: Final = {
    "<=": "at most",
    ">=": "at least",
    "<": "less than",
    ">": "more than",
}
_ENTRIES: Final = ("entries", "entry")
_LENGTHS: Final = {
    "array": _ENTRIES,
    "bytes": ("bytes", "byte"),
    "object": _ENTRIES,
    "str": ("characters", "character"),
}


def in_words(error: msgspec.ValidationError, bounds: Bounds) -> InvalidRequest:
    """What to answer; its parameter is the one of the request that it is about."""
    place = _PLACE.match(str(error))
    if place is None or place["path"] is None:
        return InvalidRequest(_of_all(str(error)))
    path = place["path"].replace("[...]", "")
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    told = path or "the request"
    if place["key"]:
        told = f"a name in {told}"
    if path in bounds and re.search(r"(<|>)=? -?[0-9.]+$", place["what"]):
        least, most = bounds[path]
        return InvalidRequest(
            f"{path} must be between {_number(least)} and {_number(most)}", param=name
        )
    return InvalidRequest(f"{told} {_said(place['what'])}", param=name or None)


def bounds_of(request_type: type[msgspec.Struct]) -> dict[str, tuple[float, float]]:
    """Of the parameters that are numbers."""
    known = {}
    for field in msgspec.structs.fields(request_type):
        shape = msgspec.inspect.type_info(field.type)
        for kind in getattr(shape, "types", (shape,)):
            least, most = getattr(kind, "ge", None), getattr(kind, "le", None)
            if least is not None and most is not None and abs(most) < 2**31:
                known[field.name] = (least, most)
    return known


def _said(what: str) -> str:
    """Of what stands at the place."""
    patterns: dict[str, Any] = {
        r"Expected `(\w+)` of length (<=|>=) (\d+)": lambda m: (
            f"must have {_COMPARED[m[2]]} {m[3]} {_LENGTHS[m[1]][m[3] == '1']}"
        ),
        r"Expected `\w+` (<=|>=|<|>) (\S+)": lambda m: (
            f"must be {_COMPARED[m[1]]} {m[2].removesuffix('.0')}"
        ),
        r"Expected `([^`]+)`, got `(\w+)`": lambda m: (
            f"must be {_kinds(m[1])}, not {_KINDS.get(m[2], m[2])}"
        ),
        r"Expected `\w+` matching regex .*": lambda _: "does not have the form that it should",
        r"Object missing required field `(\w+)`": lambda m: f"lacks {m[1]}",
        r"Invalid (?:enum )?value (.*)": lambda m: f"can't be {m[1]}",
    }
    for pattern, words in patterns.items():
        if found := re.fullmatch(pattern, what, re.DOTALL):
            return str(words(found))
    return f"is not right: {what}"


def _of_all(what: str) -> str:
    """Of the request as a whole."""
    if found := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return f"{found[1]} is missing"
    if found := re.fullmatch(r"Expected `object`, got `(\w+)`", what):
        return f"the body must be an object, not {_KINDS.get(found[1], found[1])}"
    return what


def _kinds(given: str) -> str:
    """``int | null`` and the like."""
    kinds = [_KINDS.get(kind, kind) for kind in given.split(" | ") if kind != "null"]
    return " or ".join(kinds) or "null"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
