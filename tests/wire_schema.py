"""Digest of a schema of messages: the same for schemas that encode all messages alike."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import inspect


def digest(*types: object) -> str:
    """Return the digest of these messages and of all types in them."""
    described = [_described(found) for found in inspect.multi_type_info(types)]
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:32]


def _described(found: object) -> Any:
    """Return plain values that differ if encoded messages differ; names of classes do not count."""
    match found:
        case inspect.StructType(fields=fields):
            shape = [found.tag_field, found.tag, found.array_like, found.forbid_unknown_fields]
            return ["struct", *shape, [_described_field(field) for field in fields]]
        case inspect.EnumType(cls=cls):
            return ["enum", *(member.value for member in cls)]
        case inspect.UnionType(types=types):
            return ["union", *sorted(map(_described, types), key=msgspec.json.encode)]
        case inspect.CustomType(cls=cls):
            raise TypeError(f"a message has a {cls} that no schema describes")
        case inspect.Type():
            inner = [[name, getattr(found, name)] for name in found.__struct_fields__]
            return [type(found).__name__, *[[name, _described(value)] for name, value in inner]]
        case tuple():
            return [_described(each) for each in found]
        case _:
            return repr(found)


def _described_field(field: inspect.Field) -> Any:
    factory = getattr(field.default_factory, "__name__", "")
    default = "" if field.required else f"{field.default!r}{factory}"
    return [field.encode_name, default, _described(field.type)]
