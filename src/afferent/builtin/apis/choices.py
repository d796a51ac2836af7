"""Allowed values and names at a path of a request's schema. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from msgspec import inspect

_STEPS = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_MOST = 16


@functools.cache
def _shape_of(schema: object) -> inspect.Type:
    return inspect.type_info(schema)


def values_at(schema: object, path: str) -> list[str]:
    """Return all values allowed at the path, if the schema lists them: roles, types of parts."""
    found = []
    for shape in _at(schema, path):
        match shape:
            case inspect.LiteralType(values):
                found += [str(value) for value in values]
    return found[:_MOST]


def names_at(schema: object, path: str) -> list[str]:
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
