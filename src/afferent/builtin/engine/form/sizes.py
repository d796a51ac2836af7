"""Size limits of a response format, checked before `llguidance` reads it.

A few constructs take time that no limit of `llguidance` counts. Their number is limited, so that a
format is accepted or refused on every machine alike; processor time is a backstop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from afferent.types import KiB

MAX_LITERAL_CHARS: Final = 8 * KiB
"""Most characters of a name or constant: its automaton takes quadratic time (50 ms)."""
MAX_MULTIPLES: Final = 40_000
"""Most states of the automata that check ``multipleOf`` (0.2 s)."""
_MAX_DIGITS: Final = len(str(MAX_MULTIPLES))
_MAX_ZEROS: Final = 16
_COMBINED: Final = frozenset(("allOf", "anyOf", "oneOf", "$ref"))
_CONSTANTS: Final = frozenset(("const", "enum"))


def excess_of_schema(schema: dict[str, Any]) -> str | None:
    """Return the excess of a JSON schema, as a message; ``None``: it is within the limits here."""
    longest, multiples, is_combined = 0, set[int](), False
    for key, value in _members(schema):
        is_combined |= key in _COMBINED
        longest = max(longest, len(key))
        if key in _CONSTANTS:
            longest = max(longest, *map(len, _texts(value)), 0)
        if key == "multipleOf" and isinstance(value, int | float):
            multiples.add(_coefficient(value))
    if longest > MAX_LITERAL_CHARS:
        return _too_long(longest)
    # A number with several `multipleOf` needs an automaton as large as the product of theirs.
    states = max(sum(multiples), math.lcm(*multiples) if is_combined else 0)
    if states > MAX_MULTIPLES:
        return (
            f"the numbers of multipleOf are too large together: {MAX_MULTIPLES} is the limit for"
            " their sum and, where schemas are combined, for their least common multiple"
        )
    return None


def excess_of_choice(texts: list[str]) -> str | None:
    """Return the excess of a choice, as a message; ``None``: it is within the limits here."""
    longest = max(map(len, texts), default=0)
    return _too_long(longest) if longest > MAX_LITERAL_CHARS else None


def _too_long(longest: int) -> str:
    return f"a name or constant has {longest} characters, and {MAX_LITERAL_CHARS} is the limit"


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield from each.items()
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)


def _texts(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left.extend((*each, *each.values()))
        elif isinstance(each, list):
            left.extend(each)


def _coefficient(number: float) -> int:
    """Return the digits of a number without its trailing zeros, which cost nothing."""
    exact = Decimal(number if isinstance(number, int) else str(number)).normalize()
    _, digits, exponent = exact.as_tuple()
    if len(digits) > _MAX_DIGITS or abs(int(exponent)) > _MAX_ZEROS:
        return MAX_MULTIPLES + 1
    return int("".join(map(str, digits))) or 1
