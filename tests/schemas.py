"""Generated JSON schemas, some hostile, the others of the shapes in public suites.

The shapes: keyword by keyword, function calls, settings of programs, events, and trees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "name",
    "id",
    "kind",
    "size",
    "tags",
    "owner",
    "state",
    "x-y",
    "é",
    "a b",
    'q"q',
    "nested",
)
_PATTERNS = ("^[a-z]{2,6}$", "^\\d{3}-\\d{2}$", "^(red|green)( light)?$", "[A-F]{2}", "^$|^a+$")


def made(num: int, *, seed: int) -> list[Schema]:
    """Return ``num`` schemas, always the same for a seed."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random], Schema]] = [
        _keyword, _function_call, _settings, _event, _tree, _mixed,
    ]  # fmt: skip
    return [makers[number % len(makers)](draw) for number in range(num)]


def _keyword(draw: random.Random) -> Schema:
    """Return a schema of one keyword, or of two related ones."""
    makers: list[Callable[[random.Random], Schema]] = [
        _string, _number, _choice, _list, _tuple, _either, _both, _one_of, _map, _pattern_keys,
        lambda _: {"type": ["null", "boolean"]},
        lambda d: {"const": d.choice([1, "one", None, True, [1, {"a": None}], {"b": [-0.5]}])},
        lambda _: {"properties": {"a": {"type": "boolean"}, "b": False}, "type": "object",
                   "additionalProperties": False},
    ]  # fmt: skip
    return draw.choice(makers)(draw)


def _string(draw: random.Random) -> Schema:
    short = {"type": "string", "maxLength": draw.randint(3, 12)}
    return draw.choice(
        [
            {**short, "minLength": draw.randint(0, 3)},
            {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 20},
            {
                "type": "string",
                "format": draw.choice(["date", "time", "date-time", "uuid", "ipv4"]),
            },
            {**short, "title": "Text", "description": "some text", "default": ""},
        ]
    )


def _number(draw: random.Random) -> Schema:
    low = draw.randint(-50, 50)
    return draw.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
            {"type": "number", "minimum": low, "maximum": low + 0.75},
            {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": draw.randint(2, 25)},
        ]
    )


def _choice(draw: random.Random) -> Schema:
    values: list[Any] = [*_WORDS, 0, -1.5, None, True, [], {}, ["a", 1]]
    return {"enum": draw.sample(values, draw.randint(1, 8))}


def _list(draw: random.Random) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _leaf(draw),
        "minItems": least,
        "maxItems": least + draw.randint(0, 3),
    }


def _tuple(draw: random.Random) -> Schema:
    places = [_leaf(draw) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": len(places)}


def _either(draw: random.Random) -> Schema:
    return {"anyOf": [_leaf(draw) for _ in range(draw.randint(2, 3))]}


def _both(draw: random.Random) -> Schema:
    least = draw.randint(0, 50)
    return {"allOf": [{"type": "integer"}, {"minimum": least}, {"maximum": least + 20}]}


def _one_of(draw: random.Random) -> Schema:
    """Return alternatives that differ in a constant, as discriminated unions do."""
    return {
        "oneOf": [
            _object({"kind": {"const": kind}, "value": _leaf(draw)}, required=["kind", "value"])
            for kind in draw.sample(_WORDS, 2)
        ]
    }


def _map(draw: random.Random) -> Schema:
    known = {draw.choice(_WORDS): _leaf(draw)}
    required = [*known, "first"] if draw.random() < 0.3 else [*known]
    return {
        "type": "object",
        "properties": {**known, "first": _leaf(draw)},
        "required": required,
        "additionalProperties": draw.choice([False, {"type": "boolean"}]),
    }


def _pattern_keys(draw: random.Random) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^x-[a-z]$": {"type": "boolean"}},
        "properties": {"size": _number(draw)},
        "required": ["size"],
        "additionalProperties": False,
    }


def _leaf(draw: random.Random) -> Schema:
    return draw.choice([_string, _number, _choice, lambda _: {"type": "boolean"}])(draw)


def _object(properties: Schema, *, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _function_call(draw: random.Random) -> Schema:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    arguments = {name: {**_leaf(draw), "description": f"the {name}"} for name in names}
    some = [name for name in names if draw.random() < 0.7]
    return _object(
        {"name": {"const": "search"}, "arguments": _object(arguments, required=some)},
        required=["name", "arguments"],
    )


def _settings(draw: random.Random) -> Schema:
    """Return nested objects with definitions and mostly optional members."""
    inner = {"$ref": "#/definitions/part"}
    names = draw.sample(_WORDS, 3)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings",
        **_object(
            {names[0]: inner, names[1]: {"type": "array", "items": inner, "maxItems": 2},
             names[2]: _leaf(draw)},
            required=names[:1],
        ),
        "definitions": {"part": _object({name: _leaf(draw) for name in names}, required=[])},
    }  # fmt: skip


def _event(draw: random.Random) -> Schema:
    names = draw.sample(_WORDS, draw.randint(2, 5))
    fields = {
        name: draw.choice(
            [
                {"type": ["string", "null"], "maxLength": 10},
                {"type": ["integer", "null"], "minimum": 0, "maximum": 65535},
                {"type": ["boolean", "null"]},
            ]
        )
        for name in names
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _object(
        fields, required=draw.sample(names, len(names) // 2)
    )


def _tree(draw: random.Random) -> Schema:
    node = {
        "value": _leaf(draw),
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": _object(node, required=["value"])}}


def _mixed(draw: random.Random) -> Schema:
    names = draw.sample(_WORDS, draw.randint(2, 5))
    return _object({name: _keyword(draw) for name in names}, required=names[:2])


def hostile() -> list[tuple[str, dict[str, Any]]]:
    """Return grammars that a server should refuse: a name, and vLLM's ``structured_outputs``."""
    schemas: dict[str, Any] = {
        "objects nested 500 deep": _nested('{"properties":{"a":', "}}", 500),
        "lists nested 5000 deep": _nested('{"items":', "}", 5000),
        "anyOf nested 3000 deep": _nested('{"anyOf":[', "]}", 3000),
        "allOf nested 2000 deep": _nested('{"allOf":[{"type":"object"},', "]}", 2000),
        "brackets that never close": "[" * 60_000,
        "an enum of 20000": {"enum": [f"value-{number}" for number in range(20_000)]},
        "an enum of long texts": {"enum": [str(number) * 9000 for number in range(8)]},
        "an enum of nothing": {"enum": []},
        "a constant of 60 kB": {"const": "x" * 60_000},
        "a constant of 1 MB": {"const": "x" * 1_000_000},
        "a name of 60 kB": _object({"y" * 60_000: {"const": 1}}, required=["y" * 60_000]),
        "2500 optional properties": {
            "type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}
        },
        "itself": {"$ref": "#"},
        "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                      "b": {"$ref": "#/$defs/a"}}},
        "itself and more": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [
            {"$ref": "#/$defs/a"}, {"minLength": 1}]}}},
        "http": {"$ref": "http://169.254.169.254/latest/meta-data"},
        "https": {"$ref": "https://example.org/schema.json#/a"},
        "file": {"$ref": "file:///etc/passwd"},
        "urn": {"$ref": "urn:uuid:0123"},
        "a neighbour": {"$ref": "other.json"},
        "a place that is not there": {"$ref": "#/$defs/nowhere"},
        "a dynamic reference": {"$dynamicRef": "#node"},
        "multipleOf a prime": {"type": "integer", "multipleOf": 1_000_003},
        "multipleOf a larger prime": {"type": "integer", "multipleOf": 2_147_483_647},
        "multipleOf in 40 lists": {"anyOf": [
            {"type": "integer", "multipleOf": 100_003 + 2 * n} for n in range(40)]},
        "products of alternatives": {"allOf": [
            {"anyOf": [{"properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(6)]}
            for i in range(9)]},
        "numbers without end": {"type": "number", "minimum": -1e300, "maximum": 1e300},
        "no number": {"type": "integer", "minimum": 5, "maximum": 1},
        "no text": {"type": "string", "minLength": 9, "maxLength": 1},
        "a type that is none": {"type": "strnig"},
        "types of nothing": {"type": []},
        "a type that is a number": {"type": 7},
        "properties that are none": {"type": "object", "properties": 7},
        "a length below zero": {"type": "string", "minLength": -1},
        "a length that is text": {"type": "string", "maxLength": "many"},
        "unlike each other": {"type": "array", "uniqueItems": True},
        "not": {"not": {"type": "string"}, "x-guidance": {"lenient": True}},
        "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^a"}},
        "one of them at least": {"type": "array", "contains": {"const": 1}},
        "what depends on others": {"dependentRequired": {"a": ["b"]}},
        "2000 optional properties": {
            "type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(2000)}
        },
        "if": {"if": {"type": "string"}, "then": {"const": "a"}},
        "options of its own": {"x-guidance": {"whitespace_pattern": "(a|aa)*"}, "type": "none"},
        "looking ahead": {"type": "string", "pattern": "^(?=.*a)(?=.*b).*$"},
        "an expression that explodes": {"type": "string", "pattern": "^((.{1,60}){1,60}){1,60}$"},
        "a list": [],
    }  # fmt: skip
    regexes = {
        "repeats of repeats": "(.{1,50}){1,50}",
        "repeats of repeats of repeats": "(((a{1,1000}){1,1000}){1,1000}){1,1000}",
        "a reference backwards": r"(a+)+\1",
        "an open group": "(" * 3000,
        "a repeat of nothing": "*a",
        "a repeat too often": "a{1,99999999999}",
        "an expression of 100 kB": "a?" * 50_000,
    }
    asked = [
        (name, {"json": each if isinstance(each, str) else json.dumps(each)})
        for name, each in schemas.items()
    ]
    return [*asked, *((name, {"regex": each}) for name, each in regexes.items())]


def _nested(before: str, after: str, depth: int) -> str:
    return before * depth + "{}" + after * depth
