"""The Anthropic Messages API: requests and answers in both directions."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from afferent.builtin.apis.api import Api
from afferent.builtin.apis.messages.api import AnthropicMessages, AnthropicTokenCount
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.request import (
    CallPart,
    End,
    Message,
    SamplingDefaults,
    TextPart,
    Usage,
)
from afferent.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    StoreFull,
    UnsupportedParameter,
)
from afferent.items.request import DocumentPart, MediaPart, PageRange
from afferent.media.body.raw import RawMedia
from afferent.types import Modality
from tests.builtin.dialogues import (
    BASE64,
    LONG,
    PROMPT_INFO,
    REQUEST_ID,
    Image,
    Turn,
    complete,
    dialogues,
    events,
    meant,
    outputs,
    received,
    spelled_out,
    stream,
)

API = AnthropicMessages()

_event = TypeAdapter(RawMessageStreamEvent)


def parse(messages: Any = None, *, api: Api = API, **parameters: Any) -> Call:
    body = {
        "model": "shapes",
        "messages": messages or [{"role": "user", "content": "hi"}],
        **({"max_tokens": 9} if api is API else {}),
        **parameters,
    }
    return api.parse(received(body, api.media_keys), request_id=REQUEST_ID, model="shapes")


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def image_block(image: Image) -> dict[str, Any]:
    if isinstance(image.source, str):
        return {"type": "image", "source": {"type": "url", "url": image.source}}
    source = {"type": "base64", "media_type": "image/png", "data": image.base64}
    return {"type": "image", "source": source}


def write(turns: list[Turn]) -> list[dict[str, Any]]:
    """Write the messages as a client does: a single text is a string, not a list of parts."""
    messages = []
    for turn in turns:
        content: Any = [
            {"type": "text", "text": part, "cache_control": {"type": "ephemeral"}}
            if isinstance(part, str)
            else image_block(part)
            for part in turn.parts
        ]
        if len(turn.parts) == 1 and isinstance(turn.parts[0], str):
            content = turn.parts[0]
        messages.append({"role": turn.role, "content": content})
    return messages


def in_turns(messages: list[Message]) -> list[Message]:
    return [
        Message(role, tuple(part for message in turns for part in message.parts))
        for role, turns in groupby(messages, key=lambda message: message.role)
    ]


# Requests


@settings(deadline=None, derandomize=True, max_examples=150)
@given(dialogues, st.integers(1, 300), st.booleans())
def test_what_is_written_is_what_was_meant(
    turns: list[Turn], chunk_nbytes: int, with_system: bool
) -> None:
    turns = [*turns, Turn("user", ("And now?",))]
    body: dict[str, Any] = {"model": "shapes", "max_tokens": 9, "messages": write(turns)}
    if with_system:
        turns = [Turn("system", ("Be brief.", "Be kind.")), *turns]
        body["system"] = [{"type": "text", "text": text} for text in turns[0].parts]
    call = API.parse(
        received(body, API.media_keys, chunk_nbytes=chunk_nbytes),
        request_id=REQUEST_ID,
        model="shapes",
    )
    assert spelled_out(call.generate.messages) == in_turns(meant(turns))


def test_parameters() -> None:
    call = parse(
        system="Be brief.",
        stop_sequences=["\n\n", "END"],
        temperature=1.0,
        top_p=0.5,
        top_k=3,
        stream=True,
    )
    generate = call.generate
    assert generate.messages[0] == Message("system", (TextPart("Be brief."),))
    assert (generate.max_tokens, generate.stop) == (9, ("\n\n", "END"))
    assert (generate.temperature, generate.top_p, generate.top_k) == (1.0, 0.5, 3)
    assert (call.is_stream, call.is_kept, call.previous_id) == (True, False, None)
    sampling = SamplingDefaults(top_k=50).apply(generate, max_tokens=9)
    assert sampling.top_k == 3
    assert SamplingDefaults(top_k=50).apply(parse().generate, max_tokens=9).top_k == 50


def test_what_changes_nothing_is_accepted() -> None:
    parse(
        cache_control={"type": "ephemeral"},
        metadata={"user_id": "me"},
        service_tier="auto",
        speed="standard",
        thinking={"type": "disabled"},
        tool_choice={"type": "none"},
        tools=[],
        container=None,
    )


def test_tools_that_were_used() -> None:
    messages = [
        {"role": "user", "content": "What is on the page?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "open", "input": {"page": [1, "é"]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "here"}, image_block(Image(LONG))],
                },
                {"type": "tool_result", "tool_use_id": "t2", "content": "nothing"},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    call = CallPart("open", '{"page": [1, "\\u00e9"]}')
    image = MediaPart(Modality.IMAGE, RawMedia("data", len(LONG), data=LONG))
    assert parse(messages).generate.messages == (
        Message("user", (TextPart("What is on the page?"),)),
        Message("assistant", (TextPart("I look."), call)),
        Message("tool", (TextPart("here"), image)),
        Message("tool", (TextPart("nothing"),)),
        Message("tool", (TextPart(""),)),
        Message("user", (TextPart("Well?"),)),
    )


PDF = {"type": "url", "url": "http://x/a"}
STORED = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({"source": PDF}, [DocumentPart("http://x/a")]),
        (
            {"source": PDF, "title": "T", "context": "C", "pages": 3, "dpi": 100},
            [TextPart("T\n"), TextPart("C\n"), DocumentPart("http://x/a", PageRange(3, 3), 100)],
        ),
        (
            {"source": {"type": "url", "url": "http://x/a#page=2-5&dpi=72"}},
            [DocumentPart("http://x/a", PageRange(2, 5), 72)],
        ),
        (
            {"source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}},
            [DocumentPart("data:application/pdf;base64,JVBERg==")],
        ),
        (
            {"source": {"type": "text", "media_type": "text/plain", "data": "tea"}},
            [TextPart("tea\n")],
        ),
        ({"source": {"type": "content", "content": "tea"}}, [TextPart("tea\n")]),
    ],
)
def test_document_becomes_parts(block: dict[str, Any], parts: list[Any]) -> None:
    messages = user({"type": "document", **block, "citations": {"enabled": False}})
    (message,) = parse(messages).generate.messages
    assert list(message.parts) == parts


@pytest.mark.parametrize(
    ("messages", "error", "param"),
    [
        (
            user(STORED),
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        (
            user({"type": "document", "source": PDF, "citations": {"enabled": True}}),
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        (
            user({"type": "document", "source": PDF, "pages": "5-2"}),
            InvalidRequest,
            "messages[0].content[0]",
        ),
        (
            user({"type": "image", "source": {"type": "file", "file_id": "f"}}),
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [STORED]}),
            UnsupportedParameter,
            "messages[0].content[0].content[0]",
        ),
        (
            user({"type": "tool_use", "id": "t", "name": "f", "input": {}}),
            InvalidRequest,
            "messages[0].content[0]",
        ),
        (
            [
                {"role": "assistant", "content": [image_block(Image(LONG))]},
                {"role": "user", "content": "x"},
            ],
            InvalidRequest,
            "messages[0].content[0]",
        ),
        (user({"type": "thinking", "thinking": "hm"}), InvalidRequest, "messages[0].content[0]"),
        ([{"role": "developer", "content": "x"}], InvalidRequest, "messages"),
        ([{"role": "user"}], InvalidRequest, "messages"),
        ([{"role": "user", "content": []}], InvalidRequest, "messages"),
        ([{"role": "user", "content": "x", "data": BASE64}], InvalidRequest, "messages"),
    ],
)
def test_messages_that_are_refused(
    messages: Any, error: type[InvalidRequest], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        parse(messages)
    assert (type(caught.value), caught.value.param) == (error, param)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"model": "other"}, ModelNotFound),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, UnsupportedParameter),
        ({"tools": [{"name": "f"}]}, InvalidRequest),
        ({"tool_choice": {"type": "any"}}, InvalidRequest),
        ({"tool_choice": "auto"}, InvalidRequest),
        ({"container": "c"}, UnsupportedParameter),
        ({"thread": {"type": "create"}}, UnsupportedParameter),
    ],
)
def test_parameters_that_are_not_served(
    parameters: dict[str, Any], error: type[InvalidRequest]
) -> None:
    with pytest.raises(error) as caught:
        parse(**parameters)
    assert caught.value.param == next(iter(parameters))


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"temperature": 1.1},
        {"top_p": 0},
        {"top_k": -2},
        {"stop_sequences": [""]},
        {"max_output_tokens": 3},
    ],
)
def test_parameters_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(parameters))):
        parse(**parameters)


def test_max_tokens_is_required_but_for_counting() -> None:
    asked = {"model": "shapes", "messages": [{"role": "user", "content": "hi"}]}
    body = received(asked, API.media_keys)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        API.parse(body, request_id=REQUEST_ID, model="shapes")
    count = AnthropicTokenCount()
    found = count.parse(body, request_id=REQUEST_ID, model="shapes")
    assert found.generate.messages == parse().generate.messages
    with pytest.raises(UnsupportedParameter):
        parse(api=count, tools=[{"type": "bash_20250124", "name": "f"}])


# Answers


def whole(call: Call, said: list[Any]) -> AnthropicMessage:
    return AnthropicMessage.model_validate(call.reply.whole(complete(said)))


ENDS = [
    (End("stop", Usage(12, 2)), "end_turn", None),
    (End("length", Usage(12, 2)), "max_tokens", None),
    (End("stop", Usage(12, 2), stop="END"), "stop_sequence", "END"),
]


@pytest.mark.parametrize(("end", "reason", "sequence"), ENDS)
def test_the_whole_answer(end: End, reason: str, sequence: str | None) -> None:
    message = whole(parse(), outputs("a red", " circle", end=end))
    assert (message.id, message.type, message.role) == (REQUEST_ID, "message", "assistant")
    assert message.model == "shapes"
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "a red circle"
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (12, 2)


@pytest.mark.parametrize(("end", "reason", "sequence"), ENDS)
def test_the_events_of_a_stream(end: End, reason: str, sequence: str | None) -> None:
    call = parse(stream=True)
    said = outputs("a red", "", " circle", end=end)
    seen = stream(call.reply, said)
    assert [event["type"] for event in seen] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    for event in seen:
        if event["type"] != "ping":
            assert _event.validate_python(event).type == event["type"]
    start, block, _, delta, _, _, last, _ = seen
    assert start["message"]["usage"]["input_tokens"] == 12
    assert start["message"]["usage"]["output_tokens"] == 0
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert (block["index"], block["content_block"]["text"]) == (0, "")
    assert delta["delta"] == {"type": "text_delta", "text": "a red"}
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (12, 2)


def test_a_stream_that_fails() -> None:
    reply = parse(stream=True).reply
    frames = [*reply.begin(), *reply.output(PROMPT_INFO), *reply.fail(StoreFull("no room now"))]
    assert events(frames)[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no room now"},
        "request_id": REQUEST_ID,
    }


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidRequest("why"), "invalid_request_error", "why"),
        (UnsupportedParameter("why", param="tools"), "invalid_request_error", "tools: why"),
        (BodyTooSlow("why"), "invalid_request_error", "why"),
        (ModelNotFound("why", param="model"), "not_found_error", "model: why"),
        (BodyTooLarge("why"), "request_too_large", "why"),
        (StoreFull("why"), "overloaded_error", "why"),
        (InternalError("why"), "api_error", "the server failed on this request"),
    ],
)
def test_errors(error: Any, kind: str, message: str) -> None:
    assert API.error_body(error, "msg_1") == {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": "msg_1",
    }


def test_thoughts_of_another_model_are_left_out() -> None:
    """A client goes on with a conversation that another model began."""
    thoughts = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
    ]
    answer = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "a star"}]}
    messages = [*user({"type": "text", "text": "?"}), answer, *user({"type": "text", "text": "!"})]
    said = [list(message.parts) for message in parse(messages).generate.messages]
    assert said == [[TextPart("?")], [TextPart("a star")], [TextPart("!")]]


def test_turn_of_thoughts_alone_is_no_turn() -> None:
    """An answer that was cut off while its model thought is begun again."""
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}
    generate = parse([*user({"type": "text", "text": "?"}), thought]).generate
    assert [message.role for message in generate.messages] == ["user"]
    assert not generate.template.continues_last
    with pytest.raises(InvalidRequest, match="no content"):
        parse([thought])
