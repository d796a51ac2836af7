"""Chat completions through a frontend in this process, mostly with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import httpx2 as httpx
import msgspec
import openai
import pytest

from afferent.builtin.apis.chat.api import OpenAIChat
from afferent.builtin.pipeline.request import End, Usage
from afferent.engines.protocol import Engine
from afferent.errors import StoreFull
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.workers.discover import family_of
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from tests.builtin.dialogues import REQUEST_ID, complete, outputs, received
from tests.builtin.frontends import (
    ARENA_NBYTES,
    SHAPES,
    SHARES,
    ScriptedEngine,
    frontend,
    post,
    preprocess_worker,
)
from tests.images import encoded, photo
from tests.server import ask, data_url, image_part, wait_until

SMILE = [181, 262, 255, 231]
RED_CIRCLE = [73, 390, 371]
Talk = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


def image(seed: int = 0, width: int = 60, height: int = 50) -> str:
    return data_url(encoded(photo(width, height, seed=seed), "JPEG"))


def talk(address: str, engine: Engine, conversation: Talk) -> Any:
    """Run a conversation of the official client with a frontend; return its result."""

    async def main() -> Any:
        async with frontend(address, engine=engine) as http:
            client = openai.AsyncOpenAI(
                base_url="http://frontend/v1", api_key="none", max_retries=0, http_client=http
            )
            return await conversation(client)

    return asyncio.run(main())


def send(address: str, *bodies: dict[str, Any], **options: Any) -> list[httpx.Response]:
    """Send the requests one after another; return the answers."""

    async def main() -> list[httpx.Response]:
        async with frontend(address, **options) as http:
            return [await post(http, body) for body in bodies]

    return asyncio.run(main())


# Several answers


def test_several_answers_to_one_prompt(address: str) -> None:
    engine = ScriptedEngine(RED_CIRCLE[:1], RED_CIRCLE[1:])
    request = ask([image()], "What?", n=3, seed=7)
    whole = talk(address, engine, lambda client: client.chat.completions.create(**request))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == ["a red circle"] * 3
    first, *others = engine.requests
    assert whole.usage.prompt_tokens == len(first.token_ids)
    assert whole.usage.completion_tokens == 9
    assert len({asked.request_id for asked in engine.requests}) == 3
    assert [asked.sampling.seed for asked in engine.requests] == [7, 8, 9]
    assert all((o.token_ids, o.items) == (first.token_ids, first.items) for o in others)


def test_several_answers_in_one_stream(address: str) -> None:
    async def conversation(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            **ask([], "What?", n=2), stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    *chunks, last = talk(address, ScriptedEngine([73], [390], [371]), conversation)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "a red circle"
        assert [choice.finish_reason for choice in choices][-2:] == [None, "stop"]
    assert last.choices == []
    assert last.usage.completion_tokens == 6


def test_number_of_answers_is_bounded(address: str) -> None:
    (refused,) = send(address, ask([], "What?", n=17))
    assert refused.status_code == 400
    assert "n" in refused.json()["error"]["message"]


def test_pins_go_when_all_answers_are_accepted(address: str) -> None:
    """Not at the first one: the engine may not have pinned the items for the others yet."""

    class Slow(ScriptedEngine):
        async def submit(self, request: Any) -> Any:
            if request.request_id.endswith("-1"):
                await accept.wait()
            async for event in super().submit(request):
                yield event

    accept = asyncio.Event()

    async def conversation(client: openai.AsyncOpenAI) -> None:
        asking = asyncio.create_task(client.chat.completions.create(**ask([image()], "What?", n=2)))
        with DaemonStore(address, name="watcher") as watcher:
            await asyncio.to_thread(wait_until, lambda: engine.num_finished == 1)
            assert watcher.stat().held_nbytes > 0
            accept.set()
            await asking
            await asyncio.to_thread(wait_until, lambda: watcher.stat().held_nbytes == 0)

    engine = Slow([73])
    talk(address, engine, conversation)


def test_a_failure_of_one_answer_ends_all(address: str) -> None:
    engine = ScriptedEngine([73], failure=StoreFull("sabotage"))
    (refused,) = send(address, ask([], "What?", n=4), engine=engine)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "store_full"
    assert engine.num_running == 0


def test_an_error_in_the_middle_of_a_stream(address: str) -> None:
    engine = ScriptedEngine([73], failure=StoreFull("sabotage"))
    (answer,) = send(address, ask([], "What?", stream=True), engine=engine)
    assert answer.status_code == 200
    *events, end = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert events[-1]["choices"][0]["delta"]["content"] == "a"
    assert end["error"]["code"] == "store_full"


# Log-probabilities


def test_logprobs(address: str) -> None:
    request = ask([], "What?", logprobs=True, top_logprobs=2)
    engine = ScriptedEngine([73], SMILE)
    whole = talk(address, engine, lambda client: client.chat.completions.create(**request))
    assert whole.choices[0].message.content == "a😀"
    content = whole.choices[0].logprobs.content
    assert [-100 * entry.logprob for entry in content] == pytest.approx([73, *SMILE])
    assert (content[0].token, content[0].bytes) == ("a", [97])
    assert [top.logprob for top in content[0].top_logprobs] == [-0.73, -0.74]
    assert content[0].top_logprobs[0].token == "a"
    assert (content[1].token, content[1].bytes) == ("\ufffd", None)
    assert engine.requests[0].sampling.num_logprobs == 2


def test_logprobs_of_a_stream(address: str) -> None:
    """Also for tokens whose text is delayed, by a stop string or by a part of a character."""

    async def conversation(client: openai.AsyncOpenAI) -> list[Any]:
        request = ask([], "What?", logprobs=True, stop=[" red square"], stream=True)
        return [chunk async for chunk in await client.chat.completions.create(**request)]

    steps = [[token] for token in [*RED_CIRCLE, *SMILE]]
    chunks = talk(address, ScriptedEngine(*steps), conversation)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "a red circle😀"
    entries = [e for choice in choices if choice.logprobs for e in choice.logprobs.content]
    assert [-100 * entry.logprob for entry in entries] == pytest.approx([*RED_CIRCLE, *SMILE])
    assert all(entry.top_logprobs == [] for entry in entries)


def test_logprobs_only_if_asked_for(address: str) -> None:
    engine = ScriptedEngine([73])
    plain, refused, too_many = send(
        address,
        ask([], "What?"),
        ask([], "What?", top_logprobs=2),
        ask([], "What?", logprobs=True, top_logprobs=21),
        engine=engine,
    )
    assert plain.json()["choices"][0]["logprobs"] is None
    assert engine.requests[0].sampling.num_logprobs is None
    assert refused.json()["error"]["param"] == "top_logprobs"
    assert too_many.status_code == 400


# Tolerated keys


def test_keys_that_other_libraries_add(address: str) -> None:
    """Unknown keys that change nothing are tolerated in messages, parts and parameters."""
    body = ask([image()], "What?")
    body["messages"][0]["content"][0] |= {"cache_control": {"type": "ephemeral"}}
    body["messages"][0]["content"][0]["image_url"]["format"] = "image/jpeg"
    refusal = {"type": "refusal", "refusal": "No."}
    body["messages"] += [
        {"role": "assistant", "content": "a", "refusal": None, "annotations": [{"a": [1]}]},
        {"role": "user", "content": "And?", "name": "me"},
        {"role": "assistant", "content": [refusal], "reasoning_content": "hm", "audio": None},
        {"role": "user", "content": "Well?"},
    ]
    tolerated, nested = send(address, body, {**body, "stream_options": {"usage": True}})
    assert (tolerated.status_code, nested.status_code) == (200, 200)


# Tools


def test_as_many_calls_as_are_allowed(address: str) -> None:
    def body_of(num_calls: int) -> dict[str, Any]:
        said = {"role": "assistant", "function_call": {"name": "f", "arguments": {"a": [1]}}}
        return ask([], "What?") | {
            "messages": [said] * num_calls + [{"role": "user", "content": "?"}]
        }

    async def main() -> list[httpx.Response]:
        async with frontend(address) as client:
            return [await post(client, body_of(number)) for number in (1024, 1025)]

    most, more = asyncio.run(main())
    assert most.json()["error"]["code"] == "context_length_exceeded", "it came as far as that"
    assert more.status_code == 400
    assert more.json()["error"]["param"] == "messages[1024]"


def test_images_of_a_tool(address: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    body = ask([], "Look at it!")
    body["messages"] += [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [image_part(image())]},
    ]
    engine = ScriptedEngine([73])
    (answered,) = send(address, body, engine=engine)
    assert answered.status_code == 200
    assert len(engine.requests[0].items) == 1


# Detail


def test_low_detail_bounds_the_image(rng: Any) -> None:
    """For a model whose images keep their size, the low-detail image is another item."""
    family = family_of(SHAPES)
    assert isinstance(family, QwenVlFamily)
    family = msgspec.structs.replace(family, max_pixels=2_000_000)
    engine = ScriptedEngine([73])
    url = image(3, 1000, 600)
    bodies = []
    for detail in ("high", "low", "auto", "low"):
        body = ask([url], "What?")
        body["messages"][0]["content"][0]["image_url"]["detail"] = detail
        bodies.append(body)
    with (
        StoreServer(ARENA_NBYTES, shares=SHARES) as server,
        preprocess_worker(server.address, family),
    ):
        answers = send(server.address, *bodies, engine=engine, family=family)
        misses = server_misses(server.address)
    assert [answer.status_code for answer in answers] == [200] * 4
    items = [request.items[0] for request in engine.requests]
    lengths = [item.placeholder.length for item in items]
    assert lengths[0] == lengths[2] == round(1000 / 28) * round(600 / 28)
    assert lengths[1] == lengths[3]
    assert 0.9 * 512 * 512 < lengths[1] * 28 * 28 <= 512 * 512
    assert items[0].key == items[2].key != items[1].key == items[3].key
    assert misses == 2


def test_detail_of_a_small_model_changes_nothing(address: str) -> None:
    engine = ScriptedEngine([73])
    body = ask([image()], "What?")
    low = json.loads(json.dumps(body))
    low["messages"][0]["content"][0]["image_url"]["detail"] = "low"
    odd = json.loads(json.dumps(low).replace('"low"', '"lowest"'))
    *_, refused = send(address, body, low, odd, engine=engine)
    keys = {request.items[0].key for request in engine.requests}
    assert len(keys) == 1
    assert refused.status_code == 400


def server_misses(address: str) -> int:
    with DaemonStore(address, name="watcher") as watcher:
        return watcher.stat().num_misses


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
    ],
)
def test_the_newer_limit_on_tokens_decides(limits: dict[str, int], most: int | None) -> None:
    api, said = OpenAIChat(), [{"role": "user", "content": "hi"}]
    body = received({"model": "shapes", "messages": said, **limits}, api.media_keys)
    asked = api.parse(body, request_id=REQUEST_ID, model="shapes")
    assert asked.generate.max_tokens == most


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_says_why_it_ended(reason: Literal["stop", "length"]) -> None:
    api, asked = OpenAIChat(), {"model": "shapes", "messages": [{"role": "user", "content": "hi"}]}
    body = received(asked, api.media_keys)
    reply = api.parse(body, request_id=REQUEST_ID, model="shapes").reply
    said = outputs("a", " red", end=End(reason, Usage(12, 2)))
    whole = reply.whole(complete(said))
    assert [choice["finish_reason"] for choice in whole["choices"]] == [reason]
    frames = [frame for output in said for frame in reply.output(output)]
    choices = [json.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames]
    assert [choice["finish_reason"] for choice in choices] == [None, None, reason]
