"""Tool calls in the messages of a chat; see `test_messages` and `test_responses` for other APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afferent.builtin.apis.chat.api import OpenAIChat
from afferent.builtin.pipeline.request import CallPart, Message, TextPart
from afferent.errors import InvalidRequest
from afferent.media.body.received import ReceivedBody


def parse(message: dict[str, Any]) -> Message:
    return read(json.dumps({"model": "shapes", "messages": [message]}).encode())


def read(text: bytes) -> Message:
    received = ReceivedBody(json=text, media={}, nbytes=len(text))
    call = OpenAIChat().parse(received, request_id="r", model="shapes")
    return call.generate.messages[0]


def calls(**message: Any) -> Message:
    """Parse a message of the assistant."""
    return parse({"role": "assistant", **message})


def function(name: str, arguments: Any) -> dict[str, Any]:
    described = {"name": name, "arguments": arguments}
    return {"id": "1", "type": "function", "function": described}


def argument_of(message: Message) -> Any:
    (part,) = message.parts
    assert isinstance(part, CallPart)
    return json.loads(part.arguments)


def test_calls_are_parts_after_the_text() -> None:
    arguments = '{"page": [1, "é"]}'
    custom = {"id": "2", "type": "custom", "custom": {"name": "run", "input": "ls -l"}}
    opened, ran = CallPart("open", arguments), CallPart("run", '"ls -l"')
    called = {"tool_calls": [function("open", arguments), custom]}
    alone = Message("assistant", (opened, ran))
    assert calls(content=None, **called) == calls(**called) == alone
    said = (TextPart("I look."), opened, ran)
    assert calls(content="I look.", **called) == Message("assistant", said)
    parts = [{"type": "text", "text": "I look."}]
    assert calls(content=parts, **called) == Message("assistant", said)
    old = {"name": "open", "arguments": arguments}
    assert calls(content=None, function_call=old) == Message("assistant", (opened,))
    assert calls(content="", function_call=old).parts == (opened,)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a":1,\n"b":[1e999,"x,y:z"]}', '{"a": 1, "b": [1e999, "x,y:z"]}'),
        ({"a": [1, {"b": None}]}, '{"a": [1, {"b": null}]}'),
        ("[]", "[]"),
        ("", "{}"),
        (None, "{}"),
        ({}, "{}"),
        (3, "3"),
    ],
)
def test_forms_of_arguments(arguments: Any, text: str) -> None:
    (part,) = calls(content=None, tool_calls=[function("open", arguments)]).parts
    assert part == CallPart("open", text)
    custom = {"custom": {"name": "open", "input": arguments}}
    assert calls(content=None, tool_calls=[custom]).parts == (part,)
    old = {"name": "open", "arguments": arguments}
    assert calls(content=None, function_call=old).parts == (part,)


def test_a_call_without_arguments() -> None:
    for call in ({"function": {"name": "now"}}, {"custom": {"name": "now"}}):
        assert calls(tool_calls=[call]).parts == (CallPart("now", "{}"),)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": None, "function_call": None},
        {"tool_calls": []},
        {"tool_calls": [{}, {"type": "function", "function": None}]},
        {"tool_calls": [{"function": {"name": None, "arguments": "{}"}}]},
        {"function_call": "none"},
        {"function_call": {}},
    ],
)
def test_what_calls_nothing(fields: dict[str, Any]) -> None:
    assert calls(content="Hi", **fields).parts == (TextPart("Hi"),)
    with pytest.raises(InvalidRequest) as caught:
        calls(content=None, **fields)
    assert caught.value.param == "messages[0]"


@pytest.mark.parametrize("arguments", ["{", " ", '{"a": 1} x', "[" * 100_000, '"\\ud800"'])
def test_arguments_that_are_no_json(arguments: str) -> None:
    """Models write invalid JSON; it stays unchanged."""
    message = calls(content=None, tool_calls=[function("open", arguments)])
    assert argument_of(message) == arguments


@pytest.mark.parametrize("arguments", [b'"\xff"', b'{"\xff": 1}'])
def test_arguments_that_are_no_text(arguments: bytes) -> None:
    call = b'{"name": "f", "arguments": %s}' % arguments
    message = b'{"role": "assistant", "tool_calls": [{"function": %s}]}' % call
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        read(b'{"model": "shapes", "messages": [%s]}' % message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_calls", [function("x" * 257, "{}")]),
        ("tool_calls", {"name": "f"}),
        ("tool_calls", ["f"]),
        ("function_call", {"name": 3}),
    ],
)
def test_calls_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        calls(content="x", **{field: value})
    assert caught.value.param == f"messages[0].{field}"


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_only_the_assistant_calls(role: str) -> None:
    """In messages of other roles, these are unknown keys."""
    called = {"tool_calls": [function("f", "{}")], "function_call": [3]}
    assert parse({"role": role, "content": "x", **called}).parts == (TextPart("x"),)
    with pytest.raises(InvalidRequest):
        parse({"role": role, "content": None, **called})
