"""The OpenAI Responses API: requests and answers in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from afferent.builtin.apis.openai import scored_token
from afferent.builtin.apis.responses.api import OpenAIResponses
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.request import (
    CallDelta,
    CallPart,
    End,
    Logprobs,
    Message,
    TextDelta,
    TextPart,
    Usage,
)
from afferent.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Param,
    PromptTooLong,
    ResponseNotFound,
    StoreFull,
    UnsupportedMedia,
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

API = OpenAIResponses()

_event = TypeAdapter(ResponseStreamEvent)


def parse(given: Any = "hi", **parameters: Any) -> Call:
    body = {"model": "shapes", "input": given, **parameters}
    return API.parse(received(body, API.media_keys), request_id=REQUEST_ID, model="shapes")


def only_part(*parts: Any) -> Any:
    call = parse([{"role": "user", "content": list(parts)}])
    (message,) = call.generate.messages
    (part,) = message.parts
    return part


def write(turns: list[Turn]) -> list[dict[str, Any]]:
    """Write the messages as a client does: with and without a type, a single text as a string."""
    items: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        kind = "output_text" if turn.role == "assistant" else "input_text"
        content: Any = [
            {"type": kind, "text": part}
            if isinstance(part, str)
            else {"type": "input_image", "image_url": part.url, "detail": "auto"}
            for part in turn.parts
        ]
        if len(turn.parts) == 1 and isinstance(turn.parts[0], str):
            content = turn.parts[0]
        role = "developer" if turn.role == "system" and index else turn.role
        item: dict[str, Any] = {"role": role, "content": content}
        items.append({**item, "type": "message"} if index % 2 else item)
    return items


# Requests


@settings(deadline=None, derandomize=True, max_examples=150)
@given(dialogues, st.integers(1, 300))
def test_what_is_written_is_what_was_meant(turns: list[Turn], chunk_nbytes: int) -> None:
    body = {"model": "shapes", "input": write(turns)}
    call = API.parse(
        received(body, API.media_keys, chunk_nbytes=chunk_nbytes),
        request_id=REQUEST_ID,
        model="shapes",
    )
    assert spelled_out(call.generate.messages) == meant(turns)


def test_a_plain_request() -> None:
    call = parse("What?")
    assert call.generate.messages == (Message("user", (TextPart("What?"),)),)
    assert call.generate.request_id == REQUEST_ID
    assert call.generate.logprobs is None
    assert (call.is_stream, call.is_kept) == (False, True)
    assert (call.instructions, call.previous_id) == (None, None)


def test_parameters() -> None:
    call = parse(
        instructions="Be brief.",
        previous_response_id="resp_0",
        store=False,
        stream=True,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_logprobs=3,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )
    generate = call.generate
    assert (generate.max_tokens, generate.temperature, generate.top_p) == (7, 0.5, 0.25)
    assert generate.logprobs == Logprobs(3, scored_token)
    assert call.instructions == Message("system", (TextPart("Be brief."),))
    assert (call.is_stream, call.is_kept, call.previous_id) == (True, False, "resp_0")
    by_name = parse(include=["message.output_text.logprobs"]).generate
    assert by_name.logprobs == Logprobs(0, scored_token)


def test_what_changes_nothing_is_accepted() -> None:
    parse(
        background=False,
        conversation=None,
        max_tool_calls=3,
        metadata={"a": "b"},
        parallel_tool_calls=False,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        reasoning={"effort": None},
        safety_identifier="me",
        service_tier="auto",
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "text"}},
        tool_choice="auto",
        tools=[],
        truncation="disabled",
        user="me",
    )


def test_media_that_are_sent_along() -> None:
    """Long media are cut out of the body; short ones are handled like a URL."""
    image: dict[str, Any] = {"type": "input_image", "detail": "low"}
    sent = RawMedia("data", len(LONG), data=LONG)
    found = only_part({**image, "image_url": f"data:image/png;base64,{BASE64}"})
    assert found == MediaPart(Modality.IMAGE, sent, "low")
    found = only_part({**image, "image_url": "data:image/png,text"})
    assert found == MediaPart(Modality.IMAGE, "data:image/png,text", "low")
    audio = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
    assert only_part(audio) == MediaPart(Modality.AUDIO, sent)
    audio = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}}
    assert only_part(audio) == MediaPart(Modality.AUDIO, "data:audio/mp3;base64,QUJD")


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ({"file_data": f"data:image/png;base64,{BASE64}"}, Modality.IMAGE),
        ({"file_data": f"data:audio/mpeg;base64,{BASE64}", "filename": "x.mp4"}, Modality.AUDIO),
        ({"file_data": f"data:VIDEO/mp4;base64,{BASE64}"}, Modality.VIDEO),
        ({"file_data": f"data:;base64,{BASE64}", "filename": "Clip.MOV"}, Modality.VIDEO),
        (
            {"file_data": f"data:application/octet-stream;base64,{BASE64}", "filename": "a.flac"},
            Modality.AUDIO,
        ),
    ],
)
def test_files(file: dict[str, str], kind: Modality) -> None:
    part = only_part({"type": "input_file", **file})
    assert part == MediaPart(kind, RawMedia("data", len(LONG), data=LONG))


@pytest.mark.parametrize(
    ("url", "name", "kind"),
    [
        ("https://example.com/a/b.webp?size=3", None, Modality.IMAGE),
        ("https://example.com/stream", "song.ogg", Modality.AUDIO),
        ("https://example.com/b.png", "film.mp4", Modality.VIDEO),
    ],
)
def test_files_by_url(url: str, name: str | None, kind: Modality) -> None:
    file = {"type": "input_file", "file_url": url, **({"filename": name} if name else {})}
    assert only_part(file) == MediaPart(kind, url)


def test_tools_that_were_used() -> None:
    arguments = '{"page": [1, "é"]}'
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}"}
    shown = [{"type": "input_text", "text": "here"}, image]
    given = [
        {"role": "user", "content": "What is on the page?"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "open", "arguments": arguments},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls -l"},
        {"type": "function_call_output", "call_id": "c1", "output": shown},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "nothing"},
        {"type": "function_call", "call_id": "c3", "name": "open", "arguments": "{"},
        {"type": "function_call", "call_id": "c4", "name": "now", "arguments": None},
    ]
    opened, ran, broken, now = (
        CallPart(name, text)
        for name, text in (
            ("open", arguments),
            ("run", '"ls -l"'),
            ("open", '"{"'),
            ("now", "{}"),
        )
    )
    said = (TextPart("I look."), opened, ran)
    image = MediaPart(Modality.IMAGE, RawMedia("data", len(LONG), data=LONG))
    assert parse(given).generate.messages == (
        Message("user", (TextPart("What is on the page?"),)),
        Message("assistant", said),
        Message("tool", (TextPart("here"), image)),
        Message("tool", (TextPart("nothing"),)),
        Message("assistant", (broken, now)),
    )


@pytest.mark.parametrize("value", [None, {"a": 1}, [1], "n" * 300])
@pytest.mark.parametrize("key", ["name", "arguments", "input", "output"])
def test_keys_of_calls_in_messages(key: str, value: Any) -> None:
    """Keys of tool calls are unknown keys in a message, and are ignored."""
    (message,) = parse([{"role": "user", "content": "x", key: value}]).generate.messages
    assert message == Message("user", (TextPart("x"),))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"file_url": "http://x/a.pdf"}, DocumentPart("http://x/a.pdf")),
        ({"file_url": "http://x/a?b=c#page=2-"}, DocumentPart("http://x/a?b=c", PageRange(2, 0))),
        (
            {"file_url": "http://x/a", "pages": "2-5", "dpi": 72, "detail": "low"},
            DocumentPart("http://x/a", PageRange(2, 5), 72, "low"),
        ),
        (
            {"file_data": "data:application/pdf;base64,JVBERg=="},
            DocumentPart(RawMedia("data", 4, b"%PDF")),
        ),
        (
            {"file_data": "data:;base64,JVBERg==", "filename": "A.PDF", "pages": 7},
            DocumentPart(RawMedia("data", 4, b"%PDF"), PageRange(7, 7)),
        ),
    ],
)
def test_documents(file: dict[str, Any], expected: DocumentPart) -> None:
    assert only_part({"type": "input_file", **file}) == expected


def part_at(part: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": role, "content": [part]}]


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "input_image", "file_id": "file_1"}, UnsupportedParameter),
        ({"type": "input_image"}, InvalidRequest),
        ({"type": "input_file", "file_id": "file_1"}, UnsupportedParameter),
        ({"type": "input_file"}, InvalidRequest),
        ({"type": "input_file", "file_url": "http://x", "file_data": "y"}, InvalidRequest),
        ({"type": "input_file", "file_data": BASE64}, InvalidRequest),
        ({"type": "input_file", "file_url": "http://x/a.pdf#page=0"}, InvalidRequest),
        ({"type": "input_file", "file_url": "http://x/a.pdf#dpi=9999"}, InvalidRequest),
        ({"type": "input_file", "file_url": "http://x/a.pdf", "pages": "3-1"}, InvalidRequest),
        (
            {"type": "input_file", "file_data": f"data:application/msword;base64,{BASE64}"},
            UnsupportedMedia,
        ),
        ({"type": "input_file", "file_data": f"data:;base64,{BASE64}"}, UnsupportedMedia),
    ],
)
def test_parts_that_are_refused(part: dict[str, Any], error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as caught:
        parse(part_at(part))
    assert type(caught.value) is error
    assert (caught.value.param or "").startswith("input[1].content[0]")


@pytest.mark.parametrize(
    ("given", "error", "param"),
    [
        ([], InvalidRequest, "input"),
        (3, InvalidRequest, "input"),
        ([{"role": "tool", "content": "x"}], InvalidRequest, "input"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], InvalidRequest, "input"),
        ([{"role": "user"}], InvalidRequest, "input[0]"),
        ([{"content": "x"}], InvalidRequest, "input[0]"),
        (
            [{"type": "function_call", "arguments": "{}", "call_id": "c"}],
            InvalidRequest,
            "input[0]",
        ),
        ([{"type": "function_call", "name": "n" * 300}], InvalidRequest, "input[0].name"),
        ([{"type": "function_call_output", "call_id": "c"}], InvalidRequest, "input[0]"),
        ([{"type": "function_call_output", "output": {}}], InvalidRequest, "input[0].output"),
        ([{"type": "web_search_call", "id": "ws"}], UnsupportedParameter, "input[0]"),
        (
            [{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}],
            UnsupportedParameter,
            "input[0]",
        ),
        ([{"type": "mcp_call", "name": 3, "arguments": {}}], UnsupportedParameter, "input[0]"),
        ([{"type": "item_reference", "id": "msg_1"}], UnsupportedParameter, "input[0]"),
        (
            part_at({"type": "input_image", "image_url": "http://x"}, "system"),
            InvalidRequest,
            "input[1]",
        ),
        (
            [{"role": "user", "content": "x", "url": f"data:;base64,{BASE64}"}],
            InvalidRequest,
            "input",
        ),
    ],
)
def test_input_that_is_refused(given: Any, error: type[InvalidRequest], param: str | None) -> None:
    with pytest.raises(error) as caught:
        parse(given)
    assert (type(caught.value), caught.value.param) == (error, param)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"model": "other"}, ModelNotFound),
        ({"background": True}, UnsupportedParameter),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, InvalidRequest),
        ({"conversation": {"name": "conv_1"}}, InvalidRequest),
        ({"prompt": {"id": "p"}}, UnsupportedParameter),
        ({"tools": [{"type": "web_search"}]}, UnsupportedParameter),
        ({"tool_choice": "required"}, InvalidRequest),
        ({"tool_choice": "sometimes"}, InvalidRequest),
        ({"tools": [{"type": "function"}]}, InvalidRequest),
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
        {"max_tokens": 3},
        {"max_output_tokens": 0},
        {"temperature": 2.1},
        {"top_p": 0},
        {"top_logprobs": 21},
        {"include": ["message.input_image.image_url"]},
        {"metadata": {"a": 1}},
        {"stream": "yes"},
    ],
)
def test_parameters_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(parameters))):
        parse(**parameters)


def test_what_is_not_json() -> None:
    for body in (b"", b"{", b'{"model": "\xff"}', b"[" * 60):
        with pytest.raises(InvalidRequest):
            API.parse(received(body, API.media_keys), request_id=REQUEST_ID, model="shapes")


# Answers

CUT_OFF = End("length", Usage(12, 3))


def whole(call: Call, said: list[Any]) -> dict[str, Any]:
    answer = call.reply.whole(complete(said))
    told_as: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    return told_as


def test_the_whole_answer() -> None:
    call = parse(instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, store=False)
    answer = whole(call, outputs("a red", " circle"))
    response = Response.model_validate(answer)
    assert response.id == REQUEST_ID
    assert (response.status, response.output_text) == ("completed", "a red circle")
    assert response.incomplete_details is None
    assert response.completed_at is not None
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.temperature, answer["store"]) == (0.5, False)
    (message,) = response.output
    assert message.type == "message"
    assert (message.status, message.content[0].type) == ("completed", "output_text")
    assert response.usage is not None
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (12, 2, 14)


def test_an_answer_that_was_cut_off() -> None:
    response = Response.model_validate(whole(parse(), outputs("a", " red", end=CUT_OFF)))
    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None


def test_the_events_of_a_stream() -> None:
    call = parse(stream=True, include=["message.output_text.logprobs"])
    said = outputs("a red", " circle", scored=True)
    seen = stream(call.reply, said)
    assert [event["type"] for event in seen] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in seen] == list(range(10))
    created, item, part, delta, *_ = seen[0], seen[2], seen[3], seen[4]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert (item["item"]["status"], item["item"]["content"]) == ("in_progress", [])
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert delta["delta"] == "a red"
    assert delta["logprobs"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": None},
            ],
        }
    ]
    assert seen[6]["text"] == "a red circle"
    assert len(seen[6]["logprobs"]) == 2
    assert seen[8]["item"] == seen[9]["response"]["output"][0]
    assert seen[9]["response"] == whole(call, said)
    ids = {event["item_id"] for event in seen if "item_id" in event}
    assert ids == {seen[9]["response"]["output"][0]["id"]}


def test_entries_of_a_calls_tokens_do_not_end_the_call() -> None:
    """Each token has an event with its log-probability, also where it has no text."""
    tools = [{"type": "function", "name": "f", "parameters": {"properties": {"a": {}}}}]
    call = parse(stream=True, include=["message.output_text.logprobs"], tools=tools)
    entry = TextDelta("", 0, outputs("a", scored=True)[1].logprobs)
    said = [
        PROMPT_INFO,
        entry,
        CallDelta(0, 0, "f", ""),
        entry,
        CallDelta(0, 0, None, '{"a"'),
        entry,
        CallDelta(0, 0, None, ": 1}"),
        End("stop", Usage(12, 3)),
    ]
    seen = stream(call.reply, said)
    assert [event["type"] for event in seen[2:]] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {event["output_index"] for event in seen if "output_index" in event} == {0}
    assert seen[5]["arguments"] == '{"a": 1}'
    assert seen[-1]["response"]["output"] == [seen[6]["item"]]


def test_number_without_bounds_is_no_value_of_a_parameter() -> None:
    body = received({"model": "shapes", "input": "hi", "background": "BIG"}, API.media_keys)
    body = replace(body, json=body.json.replace(b'"BIG"', b"1e999"))
    with pytest.raises(UnsupportedParameter, match="background"):
        API.parse(body, request_id=REQUEST_ID, model="shapes")


@pytest.mark.parametrize("known", [{"conversation": "conv_1"}, {"previous_response_id": "resp_1"}])
@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": []}])
def test_input_may_be_missing_where_a_conversation_goes_on(
    known: dict[str, Any], given: dict[str, Any]
) -> None:
    body = {"model": "shapes", **given}
    call = API.parse(
        received({**body, **known}, API.media_keys), request_id=REQUEST_ID, model="shapes"
    )
    assert call.generate.messages == ()
    going_on = received({**body, **known, "continue_final_message": True}, API.media_keys)
    with pytest.raises(InvalidRequest, match="there is no message"):
        API.parse(going_on, request_id=REQUEST_ID, model="shapes")
    with pytest.raises(InvalidRequest, match="input is missing") as caught:
        API.parse(received(body, API.media_keys), request_id=REQUEST_ID, model="shapes")
    assert caught.value.param == "input"


def test_every_event_is_of_the_clients_types() -> None:
    for end in (None, CUT_OFF):
        seen = stream(parse(stream=True).reply, outputs("a", " red", end=end))
        for event in seen:
            assert _event.validate_python(event).type == event["type"]
        assert seen[-1]["type"] == f"response.{'incomplete' if end else 'completed'}"
        assert seen[-1]["response"]["status"] == ("incomplete" if end else "completed")


def test_a_stream_that_fails() -> None:
    reply = parse(stream=True).reply
    before = [*reply.begin(), *reply.output(PROMPT_INFO)]
    seen = events([*before, *reply.fail(StoreFull("no room now"))])
    assert [event["type"] for event in seen[2:]] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in seen] == list(range(4))
    for event in seen:
        _event.validate_python(event)
    assert (seen[2]["code"], seen[2]["message"]) == ("store_full", "no room now")
    assert seen[3]["response"]["status"] == "failed"
    assert seen[3]["response"]["error"] == {"code": "server_error", "message": "no room now"}
    failed = events(parse().reply.fail(InternalError("a secret")))
    assert "secret" not in str(failed)


def test_errors_name_the_parameters_of_the_api() -> None:
    body = API.error_body(PromptTooLong("too long", param=Param.MESSAGES), "r")
    assert body["error"]["param"] == "input"
    assert body["error"]["code"] == "context_length_exceeded"
    missing = ResponseNotFound("not kept", param=Param.PREVIOUS_ANSWER)
    assert API.error_body(missing, "r")["error"]["param"] == "previous_response_id"
    (error, _) = events(parse(stream=True).reply.fail(PromptTooLong("long", param=Param.MESSAGES)))
    assert error["param"] == "input"
