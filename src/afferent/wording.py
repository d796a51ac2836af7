"""Messages of schema checks for invalid values, in words for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

_KINDS: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "null",
    "object": "an object",
    "str": "text",
}
_FRACTION: Final = "a fraction"
"""A number instead of a whole one; whole ones are accepted in any notation."""
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


def said(what: str) -> str:
    """Return the message that follows the name of the field: ``must be at least 1``.

    Args:
        what: The part of msgspec's message before the field.
    """
    patterns: dict[str, Any] = {
        r"Expected `(\w+)` of length (<=|>=) (\d+)": lambda m: (
            f"must have {_COMPARED[m[2]]} {m[3]} {_LENGTHS[m[1]][m[3] == '1']}"
        ),
        r"Expected `\w+` (<=|>=|<|>) (\S+)": lambda m: (
            f"must be {_COMPARED[m[1]]} {m[2].removesuffix('.0')}"
        ),
        r"Expected `([^`]+)`, got `(\w+)`": lambda m: _not_of_its_kind(m[1], m[2]),
        r"Expected `\w+` matching regex '(.*)'": lambda m: f"must be of the form {m[1]}",
        r"Object missing required field `(\w+)`": lambda m: f"lacks {m[1]}",
        r"Invalid (?:enum )?value (.*)": lambda m: f"can't be {m[1]}",
    }
    for pattern, words in patterns.items():
        if found := re.fullmatch(pattern, what, re.DOTALL):
            return str(words(found))
    return f"is not right: {what}"


def kind(name: str) -> str:
    """Return the words for a JSON type: ``an object``."""
    return _KINDS.get(name, name)


def any_of(names: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _not_of_its_kind(expected: str, got: str) -> str:
    """Return the message for a wrong type, given ``int | null`` and the like."""
    kinds = [kind(each) for each in expected.split(" | ") if each != "null"]
    is_fraction = got == "float" and "int" in expected
    return f"must be {' or '.join(kinds) or 'null'}, not {_FRACTION if is_fraction else kind(got)}"


def shown(value: object) -> str:
    """Return an invalid value of a call: itself if it is short and plain, else its type."""
    if isinstance(value, bool | int | float | str | None):
        return f"{value!r:.60}"
    return type(value).__name__
