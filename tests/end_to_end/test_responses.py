"""OpenAI Responses by the official client: right answers in stored conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.responses import Response

from afferent.conformance.images import DrawnImage
from tests import plain_http
from tests.end_to_end.naming import QUESTION, check_named
from tests.server import Server, ask, data_url, wait_until


def image(picture: DrawnImage, kind: str = "jpeg") -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(picture, kind), "detail": "auto"}


def turn(*parts: Any) -> list[Any]:
    """Return a user message of pictures and texts; strings become text parts."""
    content = [
        {"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def create(client: openai.OpenAI, given: Any, **parameters: Any) -> Response:
    found = client.responses.create(model="shapes", input=given, **parameters)
    assert isinstance(found, Response)
    return found


def counts(response: Response) -> tuple[int, int, int]:
    """Return the tokens of the prompt, of the answer, and all; cached ones are among them."""
    usage = response.usage
    assert usage is not None
    return usage.input_tokens, usage.output_tokens, usage.total_tokens


def test_held_out_pictures_are_named(server: Server, rng: np.random.Generator) -> None:
    async def main() -> None:
        async with server.async_client() as client:

            async def ask(picture: DrawnImage, kind: str) -> str:
                given = turn(image(picture, kind.lower()), QUESTION)
                response = await client.responses.create(model="shapes", input=given, store=False)
                return response.output_text

            await check_named(rng, ask)

    asyncio.run(main())


def test_files_and_instructions(
    server: Server, client: openai.OpenAI, pictures: list[DrawnImage]
) -> None:
    file = {"type": "input_file", "file_data": data_url(pictures[1], "png"), "filename": "a.png"}
    response = create(client, turn(file, QUESTION), instructions="Answer.", metadata={"a": "b"})
    assert response.output_text == "a yellow triangle"
    assert (response.instructions, response.metadata) == ("Answer.", {"a": "b"})
    assert response.status == "completed"
    plain = create(client, turn(file, QUESTION))
    assert plain.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens > plain.usage.input_tokens
    assert server.post(ask([data_url(pictures[1], "png")], QUESTION)).json()["usage"][
        "prompt_tokens"
    ] == (plain.usage.input_tokens)


def test_what_clients_send_by_default_is_accepted(
    client: openai.OpenAI, pictures: list[DrawnImage]
) -> None:
    shown = {**image(pictures[0]), "detail": "original"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    asked = [*turn(shown, QUESTION), thought, {"role": "assistant", "content": "hm"}, *turn("hi")]
    response = create(client, asked, truncation="auto")
    assert (response.status, response.truncation) == ("completed", "auto")
    counted = client.responses.input_tokens.count(model="shapes", input=asked)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens
    assert counted.object == "response.input_tokens"


def test_a_picture_that_a_tool_returned(client: openai.OpenAI, pictures: list[DrawnImage]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    shown = [image(pictures[0]), {"type": "input_text", "text": QUESTION}]
    told = {"type": "function_call_output", "call_id": "c", "output": shown}
    asked = {"role": "user", "content": QUESTION}
    first = create(client, [asked, call, told])
    assert first.output_text == "a green star"
    again = create(client, "What is in picture 1?", previous_response_id=first.id)
    assert again.output_text == "a green star"


def test_a_conversation_in_turns(
    server: Server, client: openai.OpenAI, pictures: list[DrawnImage]
) -> None:
    """The pictures of earlier messages are neither sent nor made again."""
    first = create(client, turn(image(pictures[0]), QUESTION), instructions="Answer.")
    assert first.output_text == "a green star"
    second = create(
        client,
        turn(image(pictures[1]), "What is in picture 2?"),
        previous_response_id=first.id,
    )
    assert second.output_text == "a yellow triangle"
    made = 'afferent_items_total{modality="image",outcome="made"}'
    before = server.metrics()[made]
    third = create(client, "What is in picture 1?", previous_response_id=second.id)
    other = create(client, "What is in picture 2?", previous_response_id=second.id)
    assert (third.output_text, other.output_text) == ("a green star", "a yellow triangle")
    assert third.previous_response_id == second.id
    assert server.metrics()[made] == before
    # The prompt is that of the same messages sent at once; instructions are not carried over.
    messages = [
        *turn(image(pictures[0]), QUESTION),
        {"role": "assistant", "content": "a green star"},
        *turn(image(pictures[1]), "What is in picture 2?"),
        {"role": "assistant", "content": "a yellow triangle"},
        *turn("What is in picture 1?"),
    ]
    whole = create(client, messages, store=False)
    assert counts(whole) == counts(third)
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


def test_what_is_kept_can_be_read_and_deleted(client: openai.OpenAI) -> None:
    kept = create(client, QUESTION)
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    unkept = create(client, QUESTION, store=False)
    for response_id in (kept.id, unkept.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError) as caught:
            create(client, "And now?", previous_response_id=response_id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


def test_media_that_had_to_make_room(
    server: Server, client: openai.OpenAI, pictures: list[DrawnImage]
) -> None:
    """The conversation is stored, but its picture was deleted: the client has to send it again."""
    first = create(client, turn(image(pictures[0]), QUESTION))
    rendering = f"{server.url}/v1/chat/completions/render"
    rendered = plain_http.post(
        rendering, json=ask([data_url(pictures[0])], QUESTION), timeout=60
    ).json()
    (key,) = rendered["features"]["mm_hashes"]["image"]
    with server.store() as store:
        assert store.delete([bytes.fromhex(key)]) == [True]
    with pytest.raises(openai.ConflictError) as caught:
        create(client, QUESTION, previous_response_id=first.id)
    assert caught.value.code == "media_not_cached"
    create(client, turn(image(pictures[0]), QUESTION))
    again = create(client, QUESTION, previous_response_id=first.id)
    assert again.output_text == "a green star"


def test_a_stream(client: openai.OpenAI, pictures: list[DrawnImage]) -> None:
    given = turn(image(pictures[0]), image(pictures[1]), "Name all pictures.")
    whole = create(client, given, store=False)
    with client.responses.stream(model="shapes", input=given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert len(deltas) > 3, "the answer came in one piece"
    assert "".join(deltas) == final.output_text == whole.output_text
    assert counts(final) == counts(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # The response is stored as soon as its last event is sent.
    resumed = create(client, "What is in picture 2?", previous_response_id=final.id)
    assert resumed.output_text == "a yellow triangle"


def test_a_stream_by_the_async_client(server: Server, pictures: list[DrawnImage]) -> None:
    async def main() -> list[Any]:
        async with server.async_client() as one:
            stream = await one.responses.create(
                model="shapes",
                input=turn(image(pictures[1]), QUESTION),
                max_output_tokens=2,
                stream=True,
            )
            return [event async for event in stream]

    events = asyncio.run(main())
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert (response.status, response.output_text) == ("incomplete", "a yellow")
    assert response.incomplete_details.reason == "max_output_tokens"


def test_bad_requests(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"tools": [{"type": "web_search"}]},
            openai.BadRequestError,
            "unsupported_parameter",
            "tools",
        ),
        ({"input": "a b " * 70_000}, openai.BadRequestError, "context_length_exceeded", "input"),
        (
            {"input": turn({"type": "input_image", "image_url": data_url(b"no picture" * 9)})},
            openai.BadRequestError,
            "unsupported_media",
            None,
        ),
    ]
    for parameters, kind, code, param in cases:
        with pytest.raises(kind) as caught:
            client.responses.create(
                **{"model": "shapes", "input": "hi", "stream": True, **parameters}
            )
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id is not None


def contents(page: Any) -> list[Any]:
    """Return what each item of a list has: its texts, and the types of its media."""
    return [
        [getattr(part, "text", None) or part.type for part in item.content] for item in page.data
    ]


def test_a_conversation_by_its_id(
    server: Server, client: openai.OpenAI, pictures: list[DrawnImage]
) -> None:
    """Each request sends only what is new; the prompt is that of all messages."""
    conversation = client.conversations.create(
        metadata={"topic": "shapes"}, items=turn(image(pictures[0]), "This is picture 1.")
    )
    assert (conversation.object, conversation.metadata) == ("conversation", {"topic": "shapes"})
    assert client.conversations.retrieve(conversation.id) == conversation
    made = 'afferent_items_total{modality="image",outcome="made"}'
    before = server.metrics()[made]
    first = create(client, "What is in picture 1?", conversation=conversation.id)
    assert first.output_text == "a green star"
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    assert server.metrics()[made] == before
    given = turn(image(pictures[1]), "What is in picture 2?")
    second = create(client, given, conversation={"id": conversation.id})
    assert second.output_text == "a yellow triangle"
    messages = [
        *turn(image(pictures[0]), "This is picture 1."),
        *turn("What is in picture 1?"),
        {"role": "assistant", "content": "a green star"},
        *given,
    ]
    assert counts(create(client, messages, store=False)) == counts(second)
    asked = turn("And now?")
    counted = client.responses.input_tokens.count(
        model="shapes", input=asked, conversation=conversation.id
    )
    said = {"role": "assistant", "content": "a yellow triangle"}
    whole = client.responses.input_tokens.count(model="shapes", input=[*messages, said, *asked])
    assert counted.input_tokens == whole.input_tokens
    page: Any = client.conversations.items.list(conversation.id, order="asc")
    assert contents(page) == [
        ["input_image", "This is picture 1."],
        ["What is in picture 1?"],
        ["a green star"],
        ["input_image", "What is in picture 2?"],
        ["a yellow triangle"],
    ]
    # Listed items can be sent: the images by the names of their bytes.
    listed = [item.model_dump(exclude_unset=True) for item in page]
    again = create(client, [*listed, *turn("What is in picture 2?")], store=False)
    assert again.output_text == "a yellow triangle"
    assert server.metrics()[made] == before + 1
    listed[0]["content"][0]["image_url"] = "blake3:" + 64 * "0"
    with pytest.raises(openai.ConflictError) as caught:
        create(client, listed)
    assert caught.value.code == "media_not_cached"
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


def test_a_streamed_answer_is_added_to_its_conversation(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    with client.responses.stream(
        model="shapes", input=QUESTION, conversation=conversation.id
    ) as stream:
        answer = stream.get_final_response()
    page = client.conversations.items.list(conversation.id)
    assert page.data[0].id == answer.output[0].id
    assert contents(page) == [[answer.output_text], [QUESTION]]


def test_items_of_a_conversation(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    call: Any = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'}
    told: Any = {"type": "function_call_output", "call_id": "c", "output": "nothing"}
    added = client.conversations.items.create(
        conversation.id, items=[{"role": "developer", "content": "Answer."}, call, told]
    )
    one, two, three = added.data
    assert (one.type, one.role) == ("message", "developer")
    assert (two.type, two.call_id, two.name, two.arguments) == (
        *("function_call", "c", "look", '{"a": 1}'),
    )
    assert (three.type, three.call_id, three.output) == ("function_call_output", "c", "nothing")
    assert client.conversations.items.retrieve(two.id, conversation_id=conversation.id) == two
    newest = client.conversations.items.list(conversation.id, limit=1)
    assert [item.id for item in newest] == [three.id, two.id, one.id]  # the client turns pages
    client.conversations.items.delete(two.id, conversation_id=conversation.id)
    left = client.conversations.items.list(conversation.id, order="asc", after=one.id)
    assert [item.id for item in left.data] == [three.id]
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.items.retrieve(two.id, conversation_id=conversation.id)
    assert caught.value.code == "conversation_not_found"
    changed = client.conversations.update(conversation.id, metadata={"a": "b"})
    assert client.conversations.retrieve(conversation.id) == changed
    assert changed.metadata == {"a": "b"}
    gone = client.conversations.delete(conversation.id)
    assert (gone.id, gone.object, gone.deleted) == (
        *(conversation.id, "conversation.deleted", True),
    )
    for use in (
        lambda: client.conversations.retrieve(conversation.id),
        lambda: client.conversations.delete(conversation.id),
        lambda: client.conversations.items.list(conversation.id),
        lambda: create(client, QUESTION, conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            use()
        assert caught.value.code == "conversation_not_found"


def test_a_conversation_that_can_not_be_extended(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    first = create(client, QUESTION)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        create(client, "a", conversation=conversation.id, previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="more than 262144 bytes"):
        client.conversations.items.create(
            conversation.id, items=[{"role": "user", "content": "x" * 300_000}]
        )
    with pytest.raises(openai.BadRequestError, match="at most 20 entries"):
        client.conversations.items.create(conversation.id, items=turn("a") * 21)
    with pytest.raises(openai.BadRequestError, match="order"):
        client.conversations.items.list(conversation.id, order="up")  # type: ignore[arg-type]
    assert client.conversations.items.list(conversation.id).data == []
