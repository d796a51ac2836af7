"""Readable messages for invalid requests, from the errors of the schema."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import inspect

from afferent.errors import InvalidRequest
from afferent.wording import any_of, kind, said

Bounds = Mapping[str, tuple[float, float]]
"""Minimum and maximum of parameters with both."""

_MOST_NAMES, _MOST_VALUES = 6, 16
_STEPS = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_PLACE = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)


def in_words(
    error: msgspec.ValidationError, schema: object, bounds: Bounds, *, within: str = ""
) -> InvalidRequest:
    """Return the error to answer with; its parameter is the invalid one of the request.

    Args:
        schema: The expected type.
        within: Part of the request that was decoded, if it is not the whole.
    """
    place = _PLACE.match(str(error))
    if place is None or place["path"] is None:
        return InvalidRequest(f"{within} {said(str(error))}") if within else _of_all(str(error))
    path = place["path"].replace("[...]", "")
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    told = ".".join(filter(None, (within, path))) or "the request"
    if place["key"]:
        told = f"a name in {told}"
    if path in bounds and re.search(r"(<|>)=? -?[0-9.]+$", place["what"]):
        least, most = bounds[path]
        return InvalidRequest(
            f"{path} must be between {_number(least)} and {_number(most)}", param=name
        )
    words = said(place["what"]) + _hint(place["what"], schema, path)
    return InvalidRequest(f"{told} {words}", param=name or None)


def _hint(what: str, schema: object, path: str) -> str:
    """Return the allowed values or names."""
    if what.startswith("Invalid") and (values := _values_at(schema, path)):
        return f": it is {any_of(values)}"
    if what.startswith("Expected `object") and (names := _names_at(schema, path)):
        return f"; it may have {any_of(names[:_MOST_NAMES])}"
    return ""


def bounds_of(request_type: type[msgspec.Struct]) -> dict[str, tuple[float, float]]:
    """Return the bounds of the numeric parameters."""
    known = {}
    for field in msgspec.structs.fields(request_type):
        shape = msgspec.inspect.type_info(field.type)
        for each in getattr(shape, "types", (shape,)):
            least, most = getattr(each, "ge", None), getattr(each, "le", None)
            if least is not None and most is not None and abs(most) < 2**31:
                known[field.name] = (least, most)
    return known


def _of_all(what: str) -> InvalidRequest:
    """Return the error for the request as a whole."""
    if found := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return InvalidRequest(f"{found[1]} is missing", param=found[1])
    if found := re.fullmatch(r"Expected `object`, got `(\w+)`", what):
        return InvalidRequest(f"the body must be an object, not {kind(found[1])}")
    return InvalidRequest(what)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


@functools.cache
def _shape_of(schema: object) -> inspect.Type:
    return inspect.type_info(schema)


def _values_at(schema: object, path: str) -> list[str]:
    """Return all values allowed at the path, if the schema lists them: roles, types of parts."""
    found = []
    for shape in _at(schema, path):
        match shape:
            case inspect.LiteralType(values):
                found += [str(value) for value in values]
    return found[:_MOST_VALUES]


def _names_at(schema: object, path: str) -> list[str]:
    """Return the field names of the object at the path, if it has one type."""
    objects = [s for s in _at(schema, path) if isinstance(s, inspect.StructType)]
    return [field.encode_name for field in objects[0].fields] if len(objects) == 1 else []


def _at(schema: object, path: str) -> list[inspect.Type]:
    """Return the types allowed at a path, such as ``messages[0].role``."""
    found = list(_each(_shape_of(schema)))
    for step in _STEPS.findall(path):
        found = [each for shape in found for inner in _inside(shape, step) for each in _each(inner)]
    return found


def _each(shape: inspect.Type) -> Iterator[inspect.Type]:
    match shape:
        case inspect.UnionType(types):
            for each in types:
                yield from _each(each)
        case inspect.Metadata(inner):
            yield from _each(inner)
        case _:
            yield shape


def _inside(shape: inspect.Type, step: str) -> Iterator[inspect.Type]:
    is_index = step.startswith("[")
    match shape:
        case inspect.ListType(item_type=item) if is_index:
            yield item
        case inspect.DictType(value_type=value) if is_index:
            yield value
        case inspect.StructType(tag_field=field, tag=tag) if field == step:
            yield inspect.LiteralType((tag,))
        case inspect.StructType(fields=fields):
            yield from (field.type for field in fields if field.encode_name == step)
