"""Anthropic Messages by the official client: right answers, typed errors."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import DrawnImage, draw_image
from tests import pdfs, plain_http
from tests.end_to_end.naming import QUESTION, check_named
from tests.server import Server, wait_until

PDF = base64.b64encode(pdfs.of_images([Image.new("RGB", (80, 50), "red")])).decode()
PARAMETERS: dict[str, Any] = {"model": "shapes", "max_tokens": 100}


def connection(server: Server) -> dict[str, Any]:
    return {"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 60}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(**connection(server)) as running:
        yield running


def image(picture: DrawnImage | bytes, kind: str = "JPEG") -> dict[str, Any]:
    data = picture if isinstance(picture, bytes) else picture.encode(kind)
    text = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": f"image/{kind.lower()}", "data": text}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """Return a message; strings become text blocks."""
    content = [
        {"type": "text", "text": block} if isinstance(block, str) else block for block in blocks
    ]
    return {"role": role, "content": content}


def test_held_out_pictures_are_named(server: Server, rng: np.random.Generator) -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(**connection(server)) as client:

            async def ask(picture: DrawnImage, kind: str) -> str:
                messages = [turn(image(picture, kind), QUESTION)]
                message: Any = await client.messages.create(messages=messages, **PARAMETERS)
                return str(message.content[0].text)

            await check_named(rng, ask)

    asyncio.run(main())


def test_the_answer_in_full(client: anthropic.Anthropic, pictures: list[DrawnImage]) -> None:
    messages = [
        turn(image(pictures[0]), QUESTION),
        {"role": "assistant", "content": "a green star"},
        turn(image(pictures[1]), "What is in picture 2?"),
    ]
    asked = client.messages
    message = asked.create(messages=messages, system="Answer.", **PARAMETERS)
    assert message.content[0].text == "a yellow triangle"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.model, message.role, message.type) == ("shapes", "assistant", "message")
    assert message.id.startswith("msg_")
    assert message._request_id == message.id
    limited = asked.create(messages=messages, **{**PARAMETERS, "max_tokens": 2})
    assert (limited.content[0].text, limited.stop_reason) == ("a yellow", "max_tokens")
    assert limited.usage.output_tokens == 2
    stopped = asked.create(messages=messages, stop_sequences=["star", "tri"], **PARAMETERS)
    assert (stopped.content[0].text, stopped.stop_reason) == ("a yellow ", "stop_sequence")
    assert stopped.stop_sequence == "tri"
    greedy = asked.create(
        messages=messages, extra_body={"temperature": 1.0, "top_k": 1}, **PARAMETERS
    )
    assert greedy.content == message.content
    # An answer can be sent back unchanged.
    again = asked.create(
        messages=[*messages, message.to_param(), turn("What is in picture 1?")], **PARAMETERS
    )
    assert again.content[0].text == "a green star"


def test_pictures_of_tools(client: anthropic.Anthropic, pictures: list[DrawnImage]) -> None:
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}}
    told = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image(pictures[1])]}
    message = client.messages.create(
        messages=[turn("Look."), turn(used, role="assistant"), turn(told, QUESTION)], **PARAMETERS
    )
    assert message.content[0].text
    assert message.usage.input_tokens > 40


def prompt_of(usage: anthropic.types.Usage) -> int:
    """Return all tokens of the prompt: the API counts cached ones apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stream(client: anthropic.Anthropic, pictures: list[DrawnImage]) -> None:
    messages = [turn(image(pictures[0]), image(pictures[1]), "Name all pictures.")]
    asked = client.messages
    whole = asked.create(messages=messages, **PARAMETERS)
    with asked.stream(messages=messages, **PARAMETERS) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3, "the answer came in one piece"
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert (prompt_of(final.usage), final.usage.output_tokens, final.stop_reason) == (
        prompt_of(whole.usage),
        whole.usage.output_tokens,
        whole.stop_reason,
    )
    assert final.usage.input_tokens == 1, "the rest was computed for the first answer"
    events = list(asked.create(messages=messages, stream=True, **PARAMETERS))
    started = events[0].message
    assert (prompt_of(started.usage), started.content) == (prompt_of(whole.usage), [])


def test_the_order_of_events(server: Server, pictures: list[DrawnImage]) -> None:
    """The raw events of the socket, some of which the official client hides."""
    body = {**PARAMETERS, "stream": True, "messages": [turn(image(pictures[0]), QUESTION)]}
    answer = plain_http.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    names, kinds = [], []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        names.append(name.removeprefix("event: "))
        kinds.append(json.loads(data.removeprefix("data: "))["type"])
    assert names == kinds
    num_deltas = names.count("content_block_delta")
    assert num_deltas >= 3
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_tokens_are_counted_from_headers_alone(
    server: Server, client: anthropic.Anthropic, rng: np.random.Generator
) -> None:
    messages = [turn(image(draw_image(rng)), image(draw_image(rng), "PNG"), QUESTION)]
    misses = server.metric("afferent_store_misses_total")
    asked = client.messages
    counted = asked.count_tokens(model="shapes", messages=messages, system="Answer.")
    assert server.metric("afferent_store_misses_total") == misses
    message = asked.create(messages=messages, system="Answer.", **PARAMETERS)
    assert counted.input_tokens == prompt_of(message.usage)
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


@pytest.mark.parametrize(
    ("parameters", "kind", "error", "message"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "model: "),
        (
            {"tools": [{"type": "bash_20250124", "name": "f"}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "tools[0]: tools of type 'bash_20250124' are not supported",
        ),
        (
            {"extra_body": {"temperature": 2.0}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "temperature must be between 0 and 1",
        ),
        (
            {"messages": [turn(image(b"no picture" * 9))]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "",
        ),
        (
            {"messages": [turn("x" * (2 << 20))]},
            anthropic.ContentTooLargeError,
            "request_too_large",
            "the body has more than",
        ),
    ],
)
def test_errors_are_typed(
    client: anthropic.Anthropic,
    parameters: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    error: str,
    message: str,
) -> None:
    asked = {**PARAMETERS, "messages": [turn("hi")], "stream": True, **parameters}
    with pytest.raises(kind) as caught:
        client.messages.create(**asked)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", error)
    assert body["error"]["message"].startswith(message)
    assert body["request_id"] == caught.value.request_id


def test_endpoints_are_counted_by_their_names(server: Server, client: anthropic.Anthropic) -> None:
    client.messages.create(messages=[turn("hi")], **PARAMETERS)
    client.messages.count_tokens(model="shapes", messages=[turn("hi")])
    metrics = server.metrics()
    for name in ("anthropic_messages", "anthropic_count_tokens"):
        assert metrics[f'afferent_requests_total{{api="{name}",outcome="ok"}}'] >= 1


def test_prompt_that_is_too_long_is_counted(server: Server, client: anthropic.Anthropic) -> None:
    """Clients count to decide what to leave out."""
    text = "a red circle " * 30_000
    messages: Any = [turn(text)]
    counted = client.messages.count_tokens(model="shapes", messages=messages)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(messages=messages, **PARAMETERS)
    assert counted.input_tokens > 32_768
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    document = {"type": "document", "source": source}
    few = client.messages.count_tokens(model="shapes", messages=[turn(document)])
    both = client.messages.count_tokens(model="shapes", messages=[turn(document, text)])
    assert both.input_tokens > few.input_tokens + 32_000
    assert few.input_tokens > 30
    body = {"model": "shapes", "input": text}
    assert server.post_to("/v1/responses/input_tokens", body).json()["input_tokens"] > 32_768
    body = {"model": "shapes", "prompt": text}
    assert server.post_to("/tokenize", body).json()["count"] > 32_768
