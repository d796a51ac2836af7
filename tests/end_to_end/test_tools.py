"""Tools on the built-in engine: loops of an agent with the official clients, and forced calls.

``--storm`` forces 200 calls.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import numpy as np
import pytest

from afferent.conformance.images import COLOURS, DrawnImage, draw_image
from tests.server import Server, data_url

QUESTION = "Report the colour of the picture."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string"}},
    "required": ["colour"],
    "additionalProperties": False,
}
REPORT = {"name": "report_colour", "description": "Report the colour of a picture."}
CHAT_TOOL = {"type": "function", "function": {**REPORT, "parameters": SCHEMA, "strict": True}}
RESPONSES_TOOL = {"type": "function", **REPORT, "parameters": SCHEMA, "strict": True}
MESSAGES_TOOL = {**REPORT, "input_schema": SCHEMA}
ACCURACY = 0.97


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": 60}
    with anthropic.Anthropic(base_url=server.url, **options) as made:
        yield made


@pytest.fixture
def picture(rng: np.random.Generator) -> DrawnImage:
    return draw_image(rng, colour="blue", shape="star")


def chat(picture: DrawnImage, text: str = QUESTION) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_in_chat_completions(server: Server, picture: DrawnImage, is_stream: bool) -> None:
    client, messages = server.client(), chat(picture)

    def said() -> Any:
        asked: Any = {"model": "shapes", "messages": messages, "tools": [CHAT_TOOL]}
        if not is_stream:
            return client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            return stream.get_final_completion().choices[0]

    called = said()
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("report_colour", '{"colour":"blue"}')
    messages.append(called.message.model_dump(include={"role", "content", "tool_calls"}))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    ended = said()
    assert (ended.finish_reason, ended.message.content) == ("stop", "a blue star")
    assert not ended.message.tool_calls


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_in_responses(server: Server, picture: DrawnImage, is_stream: bool) -> None:
    client = server.client()

    def said(given: Any, **fields: Any) -> Any:
        asked: Any = {"model": "shapes", "input": given, "tools": [RESPONSES_TOOL], **fields}
        if not is_stream:
            return client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            return stream.get_final_response()

    image = {"type": "input_image", "image_url": data_url(picture)}
    content = [image, {"type": "input_text", "text": QUESTION}]
    called = said([{"role": "user", "content": content}])
    (call,) = called.output
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "report_colour",
        '{"colour":"blue"}',
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    ended = said([result], previous_response_id=called.id)
    assert ended.output_text == "a blue star"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_in_messages(
    client: anthropic.Anthropic, picture: DrawnImage, is_stream: bool
) -> None:
    source = {"type": "base64", "media_type": "image/jpeg"}
    source["data"] = base64.b64encode(picture.encode()).decode()
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]

    def said() -> Any:
        asked: Any = {"model": "shapes", "max_tokens": 200, "messages": messages}
        asked["tools"] = [MESSAGES_TOOL]
        if not is_stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    called = said()
    (call,) = called.content
    assert (called.stop_reason, call.name, call.input) == (
        "tool_use",
        "report_colour",
        {"colour": "blue"},
    )
    messages.append({"role": "assistant", "content": [call.model_dump(exclude_none=True)]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
    messages.append({"role": "user", "content": [result]})
    ended = said()
    assert (ended.stop_reason, ended.content[0].text) == ("end_turn", "a blue star")


def test_a_runner_that_asks_for_a_thread_sends_all_messages(
    client: anthropic.Anthropic, picture: DrawnImage
) -> None:
    """Anthropic's runner asks for a thread on the server, and goes on without one."""
    called: list[str] = []

    @anthropic.beta_tool
    def report_colour(colour: str) -> str:
        """Report the colour of a picture."""
        called.append(colour)
        return "ok"

    source: Any = {"type": "base64", "media_type": "image/jpeg"}
    source["data"] = base64.b64encode(picture.encode()).decode()
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    runner = client.beta.messages.tool_runner(
        model="shapes",
        max_tokens=200,
        messages=[{"role": "user", "content": content}],
        tools=[report_colour],
    )
    ended: Any = runner.until_done()
    assert (called, ended.content[0].text) == (["blue"], "a blue star")


def test_a_result_with_a_picture(server: Server, picture: DrawnImage) -> None:
    look = {"type": "function", "function": {"name": "take_screenshot"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is on the screen?"}]
    client = server.client()
    asked: Any = {"model": "shapes", "messages": messages, "tools": [look]}
    called = client.chat.completions.create(**asked).choices[0].message
    (call,) = called.tool_calls or []
    assert call.function.arguments == "{}"
    messages.append(called.model_dump(include={"role", "content", "tool_calls"}))
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    messages.append({"role": "tool", "tool_call_id": call.id, "content": [image]})
    assert client.chat.completions.create(**asked).choices[0].message.content == "a blue star"


def test_a_question_that_needs_no_tool(server: Server, picture: DrawnImage) -> None:
    asked: Any = {"messages": chat(picture, "What is in the picture?"), "tools": [CHAT_TOOL]}
    for choice in ("auto", "none"):
        (said,) = (
            server.client()
            .chat.completions.create(model="shapes", tool_choice=choice, **asked)
            .choices
        )
        assert (said.message.content, said.message.tool_calls) == ("a blue star", None)


@pytest.mark.parametrize("is_listed", [False, True], ids=["free string", "enumeration"])
def test_forced_calls_name_the_right_colour(
    server: Server,
    rng: np.random.Generator,
    request: pytest.FixtureRequest,
    is_listed: bool,
) -> None:
    pictures = [draw_image(rng) for _ in range(200 if request.config.getoption("--storm") else 24)]
    kind = {"type": "string", "enum": list(COLOURS)} if is_listed else {"type": "string"}
    schema = {**SCHEMA, "properties": {"colour": kind}}
    tool = {"type": "function", "function": {**REPORT, "parameters": schema}}
    client = server.client()

    def said(picture: DrawnImage) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model="shapes",
            messages=chat(picture, "What is in the picture?"),  # type: ignore[arg-type]
            tools=[tool],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert answer.usage is not None
        return json.loads(call.function.arguments)["colour"], answer.usage.completion_tokens

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(said, pictures))
    right = [colour == p.colour for (colour, _), p in zip(answers, pictures, strict=True)]
    assert sum(right) >= ACCURACY * len(pictures) - 0.5, answers
    assert sorted(tokens for _, tokens in answers)[len(answers) // 2] <= 24


def test_tools_in_temperature(server: Server, picture: DrawnImage) -> None:
    """Each call is valid, also of unlikely tokens."""
    answers = server.client().chat.completions.create(
        model="shapes",
        messages=chat(picture),  # type: ignore[arg-type]
        tools=[CHAT_TOOL],  # type: ignore[list-item]
        tool_choice="required",
        temperature=2.0,
        max_tokens=500,
        n=8,
    )
    for choice in answers.choices:
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            assert call.function.name == "report_colour"
            if choice.finish_reason == "tool_calls":
                assert json.loads(call.function.arguments).keys() == {"colour"}
