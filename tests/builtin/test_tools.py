"""Tools of requests, and calls in answers, in each API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from anthropic.types import Message as AnthropicMessage
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from afferent.builtin.apis.parameters import CHAT, MESSAGES, RESPONSES
from afferent.builtin.pipeline.call import Answer, Reply
from afferent.builtin.pipeline.call_reader import CallReader
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.request import (
    CallDelta,
    CallPart,
    End,
    Output,
    PromptInfo,
    TextDelta,
    ToolUse,
    Usage,
)
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.types import ToolFunction
from tests.builtin.test_parameters import BY_NAME, parse

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOSED = {**PARAMETERS, "additionalProperties": False}
WEATHER = ToolFunction("weather", Raw(json.dumps(CLOSED, separators=(",", ":")).encode()))
NOW = ToolFunction("now", Raw(b'{"type":"object","properties":{},"additionalProperties":false}'))
END = End("stop", Usage(11, 7))


def tool(api: str, name: str, parameters: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    if api == MESSAGES:
        return {"name": name, "input_schema": parameters or {"properties": {}}, **fields}
    function = {"name": name, **({"parameters": parameters} if parameters else {}), **fields}
    return {"type": "function", **({"function": function} if api == CHAT else function)}


def tools(api: str) -> list[dict[str, Any]]:
    return [tool(api, "weather", PARAMETERS, description="Of a city"), tool(api, "now", None)]


def use_of(api: str, **fields: Any) -> ToolUse | None:
    return parse(BY_NAME[api], tools=tools(api), **fields).generate.tool_use


def named(api: str, name: str) -> dict[str, Any]:
    if api == CHAT:
        return {"type": "function", "function": {"name": name}}
    return {"type": "tool" if api == MESSAGES else "function", "name": name}


def must(api: str) -> Any:
    return {"type": "any"} if api == MESSAGES else "required"


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_tools_in_the_words_of_each_api(api: str) -> None:
    assert use_of(api) == ToolUse(functions=(WEATHER, NOW))
    assert use_of(api, tool_choice=must(api)) == ToolUse(functions=(WEATHER, NOW), must_call=True)
    chosen = use_of(api, tool_choice=named(api, "now"))
    assert chosen == ToolUse(functions=(NOW,), must_call=True)
    generate = parse(BY_NAME[api], tools=tools(api)).generate
    shown = [each["function"] for each in generate.template.variables["tools"]]
    assert shown[0] == {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}
    assert shown[1]["name"] == "now"
    assert generate.template.num_characters > 100
    assert generate.form_param == "tools"


def test_one_call_at_a_time() -> None:
    alone = ToolUse(functions=(WEATHER, NOW), is_parallel=False)
    assert use_of(CHAT, parallel_tool_calls=False) == alone
    assert use_of(RESPONSES, parallel_tool_calls=False) == alone
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert use_of(MESSAGES, tool_choice=choice) == alone


def test_allowed_tools() -> None:
    listed = {"mode": "required", "tools": [named(CHAT, "now")]}
    allowed = ToolUse(functions=(NOW,), must_call=True)
    assert use_of(CHAT, tool_choice={"type": "allowed_tools", "allowed_tools": listed}) == allowed
    listed = {"mode": "auto", "tools": [named(RESPONSES, "now")]}
    allowed = ToolUse(functions=(NOW,))
    assert use_of(RESPONSES, tool_choice={"type": "allowed_tools", **listed}) == allowed


def test_older_names() -> None:
    functions = [each["function"] for each in tools(CHAT)]
    call = parse(BY_NAME[CHAT], functions=functions, function_call={"name": "now"})
    assert call.generate.tool_use == ToolUse(functions=(NOW,), must_call=True)


def test_an_open_object_stays_open() -> None:
    for parameters in ({"type": "object"}, {**PARAMETERS, "additionalProperties": {}}):
        call = parse(BY_NAME[CHAT], tools=[tool(CHAT, "f", parameters)])
        assert call.generate.tool_use is not None
        (function,) = call.generate.tool_use.functions
        assert json.loads(bytes(function.parameters)) == parameters


@pytest.mark.parametrize(
    ("api", "fields", "error", "param"),
    [
        (CHAT, {"tools": [], "tool_choice": "required"}, InvalidRequest, "tool_choice"),
        (CHAT, {"tool_choice": named(CHAT, "x")}, InvalidRequest, "tool_choice"),
        (CHAT, {"tool_choice": "perhaps"}, InvalidRequest, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function"}}, InvalidRequest, "tool_choice"),
        (
            CHAT,
            {"tool_choice": {"allowed_tools": {"mode": "auto", "tools": []}}},
            InvalidRequest,
            "tool_choice",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, InvalidRequest, "tools"),
        (CHAT, {"tools": [tool(CHAT, "f", PARAMETERS, strict=True)]}, InvalidRequest, "tools"),
        (CHAT, {"tools": [tool(CHAT, "f", {"enum": ["x" * 140_000]})]}, InvalidRequest, "tools"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, UnsupportedParameter, "tools"),
        (MESSAGES, {"tools": [{"name": "f"}]}, InvalidRequest, "tools"),
        (MESSAGES, {"tool_choice": {"type": "tool"}}, InvalidRequest, "tool_choice"),
    ],
)
def test_tools_that_are_refused(
    api: str, fields: dict[str, Any], error: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(error) as caught:
        parse(BY_NAME[api], **({"tools": tools(api)} | fields))
    assert caught.value.param == param


def test_a_strict_tool() -> None:
    strict = tool(CHAT, "f", CLOSED, strict=True)
    use = parse(BY_NAME[CHAT], tools=[strict]).generate.tool_use
    assert use is not None
    assert use.functions[0].is_strict


@pytest.mark.parametrize("given", [{}, {"parameters": None}])
def test_strict_tool_without_parameters_takes_none(given: dict[str, Any]) -> None:
    function = {"name": "now", "strict": True, **given}
    use = parse(BY_NAME[CHAT], tools=[{"type": "function", "function": function}]).generate.tool_use
    assert use is not None
    schema = msgspec.json.decode(use.functions[0].parameters)
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


# Calls in a text

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_calls = st.lists(st.tuples(st.text(), st.dictionaries(st.text(), _json_values, max_size=3)))
_texts = st.text().filter(lambda text: "<" not in text)


@given(_texts, _calls, st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_calls_are_read_wherever_the_text_is_cut(
    text: str, calls: list[tuple[str, dict[str, Any]]], has_lines: bool, cuts: list[int]
) -> None:
    begin, end = ("<call>\n", "\n</call>") if has_lines else ("<call>", "</call>")
    written, expected = text, []
    for name, arguments in calls:
        told = json.dumps(arguments, ensure_ascii=False)
        written += f'{begin}{{"name": {json.dumps(name)}, "arguments": {told}}}{end}'
        expected.append(CallPart(name, told))
    edges = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
    reader, collector = CallReader(0, "<call>", "</call>"), AnswerCollector()
    outputs: list[Output] = []
    for start, stop in itertools.pairwise(edges):
        outputs += reader.feed(written[start:stop])
    for output in [*outputs, *reader.flush(), END]:
        collector.add(output)
    (answer,) = collector.complete()
    assert answer.calls == tuple(expected)
    assert answer.text.strip() == text.strip()


def test_a_call_that_is_cut_off() -> None:
    reader, collector = CallReader(0, "<call>", "</call>"), AnswerCollector()
    for output in [*reader.feed('<call>{"name":"f","arguments":{"a":"x'), *reader.flush(), END]:
        collector.add(output)
    assert collector.complete()[0].calls == (CallPart("f", '{"a":"x'),)
    reader = CallReader(0, "<call>", "</call>")
    assert reader.feed("a <ca") == [TextDelta("a ", 0)]
    assert reader.flush() == [TextDelta("<ca", 0)]


# Calls in an answer

SAID: list[Output] = [
    TextDelta("I look."),
    CallDelta(0, 0, "weather"),
    CallDelta(0, 0, arguments='{"city":'),
    CallDelta(0, 0, arguments='"Oslo"}'),
    CallDelta(0, 1, "now"),
    CallDelta(0, 1, arguments="{}"),
]
ANSWER = Answer(
    "I look.", END, calls=(CallPart("weather", '{"city":"Oslo"}'), CallPart("now", "{}"))
)


def reply_of(api: str) -> Reply:
    return parse(BY_NAME[api], tools=tools(api), stream=True).reply


def events(api: str, outputs: list[Output]) -> list[dict[str, Any]]:
    reply = reply_of(api)
    frames = reply.begin()
    for output in [PromptInfo((), 11), *outputs]:
        frames += reply.output(output)
    lines = b"".join([*frames, *reply.finish()]).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def test_calls_in_chat_completions() -> None:
    whole = ChatCompletion.model_validate(reply_of(CHAT).whole([ANSWER]))
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    calls = choice.message.tool_calls or []
    told = [(call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]
    assert told == [("weather", '{"city":"Oslo"}'), ("now", "{}")]
    assert len({call.id for call in calls}) == 2
    alone = Answer("", END, calls=ANSWER.calls)
    assert reply_of(CHAT).whole([alone])["choices"][0]["message"]["content"] is None
    chunks = [ChatCompletionChunk.model_validate(each) for each in events(CHAT, [*SAID, END])]
    deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [delta.index for delta in deltas] == [0, 0, 0, 1, 1]
    assert [delta.id for delta in deltas if delta.id] == [call.id for call in calls]
    pieces = [delta.function.arguments for delta in deltas if delta.function]
    assert pieces == ["", '{"city":', '"Oslo"}', "", "{}"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    cut = events(CHAT, [*SAID, End("length", Usage(11, 7))])
    assert cut[-1]["choices"][0]["finish_reason"] == "length"


def test_calls_in_responses() -> None:
    whole = Response.model_validate_json(msgspec.json.encode(reply_of(RESPONSES).whole([ANSWER])))
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    seen = events(RESPONSES, [*SAID, END])
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in seen:
        assert event_type.validate_python(event).type == event["type"]
    added = [e["output_index"] for e in seen if e["type"] == "response.output_item.added"]
    done = [e for e in seen if e["type"] == "response.output_item.done"]
    assert added == [0, 1, 2] == [each["output_index"] for each in done]
    assert [each["item"] for each in done] == seen[-1]["response"]["output"]
    arguments = [e["arguments"] for e in seen if e["type"].endswith("arguments.done")]
    assert arguments == ['{"city":"Oslo"}', "{}"]
    alone = events(RESPONSES, [*SAID[1:], END])
    assert [item["type"] for item in alone[-1]["response"]["output"]] == ["function_call"] * 2


def test_calls_in_messages() -> None:
    whole = AnthropicMessage.model_validate(reply_of(MESSAGES).whole([ANSWER]))
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.content[1].input == {"city": "Oslo"}  # type: ignore[union-attr]
    seen = events(MESSAGES, [*SAID, END])
    blocks = [e["index"] for e in seen if e["type"] == "content_block_start"]
    assert blocks == [0, 1, 2] == [e["index"] for e in seen if e["type"] == "content_block_stop"]
    deltas = [e["delta"] for e in seen if e["type"] == "content_block_delta"]
    assert [d.get("partial_json") for d in deltas] == [None, '{"city":', '"Oslo"}', "{}"]
    assert seen[-2]["delta"]["stop_reason"] == "tool_use"
    alone = events(MESSAGES, [*SAID[1:], END])
    started = [e["content_block"] for e in alone if e["type"] == "content_block_start"]
    assert [block["type"] for block in started] == ["tool_use", "tool_use"]
