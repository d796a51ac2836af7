"""Explanation of a refused message, by the names of the call's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct

from afferent.errors import FormatError
from afferent.store.protocol.requests import Request
from afferent.types import KEY_NBYTES
from afferent.wording import any_of, said, shown

T = TypeVar("T")

UNREADABLE = "a message does not follow its schema"
_REFUSED = re.compile(rf"{UNREADABLE}: (?P<what>.*) - at `\$(?P<path>[^`]*)`", re.DOTALL)
_KEYS = ("key", "keys")


def check_key(key: object, called: str = "one of these") -> None:
    """Check that a value is a key, with a clearer message than a schema's.

    Raises:
        FormatError: It is not a key.
    """
    if not isinstance(key, bytes | bytearray | memoryview):
        what = f"is of type {type(key).__name__}"
    elif len(key) != KEY_NBYTES:
        what = f"has {len(key)}"
    else:
        return
    raise FormatError(f"a key is {KEY_NBYTES} bytes, made by afferent.keys; {called} {what}")


def listed(argument: str, values: Iterable[T]) -> list[T]:
    """Return the values as a list.

    Raises:
        FormatError: It is no iterable, or a single string.
    """
    if not isinstance(values, str | bytes):
        try:
            return list(values)
        except TypeError:
            pass
    raise FormatError(f"{argument} must be a list, not {shown(values)}")


def explained(request: Request[Any], message: str) -> str:
    """Return the message of a refused request, with the name of the invalid argument.

    Raises:
        FormatError: The invalid argument is a key.
    """
    refused = _REFUSED.fullmatch(message)
    if refused is None:
        return message
    value: Any = request
    told, field, declared = "", "", None
    for step in map(int, re.findall(r"\[(\d+)\]", refused["path"])):
        if isinstance(value, Struct):  # on the wire a list, preceded by the tag
            is_tagged = value.__struct_config__.tag is not None
            described = msgspec.structs.fields(value)[step - is_tagged]
            field, declared = described.name, described.type
            told, value = f"{told}.{field}".lstrip("."), getattr(value, field)
        elif isinstance(value, list | tuple):
            told, value = f"{told}[{step}]", value[step]
            if isinstance(value, Struct) and type(value) not in _within(declared, Struct):
                return f"{told} {_no_struct(value, declared)}"
        else:
            break
    if field in _KEYS:
        check_key(value, told)
    return f"{told} {_words(refused['what'], value, declared)}"


def _words(what: str, value: object, declared: object) -> str:
    if what.startswith("Expected `array`, got") and any(_within(declared, Struct)):
        return _no_struct(value, declared)
    enums = _within(declared, StrEnum)
    if what.startswith("Invalid enum value") and enums:
        return f"can't be {shown(value)}: it is {any_of(each.value for each in next(enums))}"
    return said(what)


def _no_struct(value: object, declared: object) -> str:
    names = (each.__name__ for each in _within(declared, Struct))
    return f"must be a {any_of(names)}, not {shown(value)}"


def _within(declared: object, base: type[T]) -> Iterator[type[T]]:
    """Yield the subclasses of ``base`` in a declared type."""
    if isinstance(declared, type) and issubclass(declared, base):
        yield declared
    for part in get_args(declared):
        yield from _within(part, base)
