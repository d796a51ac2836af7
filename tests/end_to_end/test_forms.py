"""Structured outputs of whole servers, with the built-in model and with a random one.

Neither model was trained for them. ``--storm`` tests 200 schemas with each.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import anthropic
import httpx2 as httpx
import openai
import psutil
import pytest
from jsonschema import validators
from pydantic import BaseModel, Field

from afferent.builtin.engine.launch import FORMS
from afferent.types import MiB
from tests import plain_http, schemas
from tests.end_to_end.test_parameters import WAYS, Way
from tests.models import make_llava
from tests.server import Server, wait_until

MAX_TOKENS = 300
LONGEST_REFUSAL_S = 20.0
"""For a busy machine; on an idle one, a refusal takes less than one second."""
MAX_GROWTH_NBYTES = 128 * MiB


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models") / "llava"
    make_llava(folder)
    with Server(str(folder), "--served-model-name", "shapes", "--arena-nbytes", "96MiB") as running:
        yield running


def chat(server: Server, **given: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "What is in the picture?"}]
    return server.post({"model": "shapes", "messages": messages, "max_tokens": MAX_TOKENS, **given})


def said(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("which", ["server", "random_model"])
def test_every_answer_that_ends_is_of_its_schema(
    which: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(which)
    num = 200 if request.config.getoption("--storm") else 24
    asked = schemas.made(num, seed=num)

    def ask(number: int) -> tuple[str, str]:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": asked[number]}}
        return said(chat(server, response_format=form, temperature=1, seed=number))

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(num)))
    num_ended = 0
    for schema, (text, reason) in zip(asked, answers, strict=True):
        if reason != "stop":
            assert reason == "length"
            continue
        num_ended += 1
        validators.validator_for(schema, default=validators.Draft202012Validator)(schema).validate(
            json.loads(text)
        )
    print(f"{num_ended} of {num} answers have ended")
    assert num_ended > num * 0.6


# Each API


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "chat": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    },
    "responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def format_of(way: Way) -> dict[str, Any]:
    return next(FORMATS[name] for name, each in WAYS.items() if each is way)


def test_json_in_each_api(server: Server, way: Way) -> None:
    answer = way.ask(server, **format_of(way))
    assert json.loads(answer.text).keys() == {"n"}
    assert answer.reason == way.ended
    cut = way.ask(server, **format_of(way), **{way.limit: 2})
    assert (cut.reason, cut.num_tokens) == (way.cut, 2)
    assert answer.text.startswith(cut.text)


def test_texts_in_each_api(server: Server, way: Way) -> None:
    choice = ["a red circle", "é", "no picture"]
    asked = {"structured_outputs": {"choice": choice}, "temperature": 1}
    assert {way.ask(server, **asked, seed=seed).text for seed in range(6)} <= set(choice)
    answer = way.ask(server, structured_outputs={"regex": r"[A-F]{3}-\d{2}"})
    assert re.fullmatch(r"[A-F]{3}-\d{2}", answer.text)
    begun = {"structured_outputs": {"regex": "a*b"}, "min_tokens": 3, way.limit: 12}
    answer = way.ask(server, **begun, **{way.stop: ["b"]})
    assert set(answer.text) <= {"a"}


def test_a_wrong_form_in_each_api(server: Server, way: Way) -> None:
    refused = way.post(server, structured_outputs={"json": {"type": "strnig"}})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.endswith("the JSON schema can't be followed: Invalid type: strnig")
    if way.path != "/v1/messages":
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_form", "structured_outputs")
    stream = way.post(server, structured_outputs={"regex": "("}, stream=True)
    assert stream.status_code == 400


def test_completions(server: Server) -> None:
    asked = {"model": "shapes", "prompt": "The picture shows", "guided_choice": ["a", "b"]}
    answer = plain_http.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert answer.json()["choices"][0]["text"] in ("a", "b")


def test_any_object(server: Server) -> None:
    text, reason = said(
        chat(server, response_format={"type": "json_object"}, temperature=1, seed=4)
    )
    assert text.startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_several_answers_and_a_stream(server: Server) -> None:
    asked = {"structured_outputs": {"choice": ["a", "b", "c", "d"]}, "temperature": 1, "seed": 1}
    answer = chat(server, **asked, n=8)
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert len(texts) == 8
    assert set(texts) <= set("abcd")
    assert [said(chat(server, **asked, n=1))[0]] == texts[:1], "the same each time"
    stream = chat(server, **asked, stream=True, logprobs=True, top_logprobs=2)
    deltas = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        for line in stream.text.splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(deltas) == texts[0]


# The official clients


class Part(BaseModel):
    colour: Literal["red", "green", "blue"]
    shape: Literal["star", "circle"]


class Picture(BaseModel):
    parts: Annotated[list[Part], Field(min_length=1, max_length=2)]
    number: Annotated[int, Field(ge=0, le=99)]
    title: Annotated[str, Field(max_length=8)] | None


QUESTION: list[Any] = [{"role": "user", "content": "What is in the picture?"}]


def test_chat_completions_parse(server: Server) -> None:
    client = server.client()
    answer = client.chat.completions.parse(
        model="shapes", messages=QUESTION, response_format=Picture, temperature=1, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Picture)
    with client.chat.completions.stream(
        model="shapes", messages=QUESTION, response_format=Picture
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Picture)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="shapes", messages=QUESTION, response_format=Picture, max_tokens=3
        )


def test_responses_parse(server: Server) -> None:
    client = server.client()
    answer = client.responses.parse(
        model="shapes", input=QUESTION, text_format=Picture, temperature=1
    )
    assert isinstance(answer.output_parsed, Picture)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    with client.responses.stream(model="shapes", input=QUESTION, text_format=Picture) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Picture)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.responses.create(
            model="shapes",
            input=QUESTION,
            text={
                "format": {
                    "type": "json_schema",
                    "name": "n",
                    "schema": {"type": "array", "uniqueItems": True},
                }
            },
        )


def test_messages_parse(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.parse(
            model="shapes", messages=QUESTION, max_tokens=400, output_format=Part
        )
        assert isinstance(answer.parsed_output, Part)


# Hostile grammars, and failures


def test_hostile_forms_are_refused_while_others_go_on(server: Server) -> None:
    asked = schemas.hostile()
    assert len(asked) >= 50
    processes = [*server.find(FORMS), *server.engine_workers()]
    before = sum(process.memory_info().rss for process in processes)
    is_over, others, longest_s = threading.Event(), [], 0.0

    def go_on() -> None:
        while not is_over.is_set():
            answer = chat(server, max_tokens=20)
            others.append((answer.status_code, answer.elapsed.total_seconds()))

    def refuse(each: tuple[str, dict[str, Any]]) -> tuple[str, int, str, float]:
        answer = chat(server, structured_outputs=each[1])
        return each[0], answer.status_code, answer.text, answer.elapsed.total_seconds()

    with ThreadPoolExecutor(4) as threads:
        going_on = threads.submit(go_on)
        try:
            for name, status, text, seconds in threads.map(refuse, asked):
                assert status == 400, (name, text)
                assert '"param":"structured_outputs"' in text, (name, text)
                longest_s = max(longest_s, seconds)
        finally:
            is_over.set()
        going_on.result()
    print(f"longest refusal {longest_s:.2f} s; others: {len(others)}, {max(others)[1]:.2f} s")
    assert longest_s < LONGEST_REFUSAL_S
    assert {status for status, _ in others} == {200}
    assert [*server.find(FORMS), *server.engine_workers()] == processes, "none of them has died"
    wait_until(lambda: len(server.find(FORMS)) == 1)  # and no fork of it is left
    assert sum(process.memory_info().rss for process in processes) < before + MAX_GROWTH_NBYTES


def test_a_form_that_becomes_too_much_ends_its_answer_alone(server: Server) -> None:
    """The check before the request covers only the beginning of an answer, and does not find it."""
    with ThreadPoolExecutor(2) as threads:
        plain = threads.submit(chat, server, ignore_eos=True)
        refused = chat(server, structured_outputs={"regex": "(ab){100}(.{1,60}){1,60}"})
        assert said(plain.result())[1] == "length"
    assert refused.status_code == 400
    assert "it takes too much" in refused.json()["error"]["message"]


def test_who_tries_forms_may_be_killed(server: Server) -> None:
    (process,) = server.find(FORMS)
    process.kill()
    wait_until(lambda: not psutil.pid_exists(process.pid) or len(server.find(FORMS)) == 1)
    assert said(chat(server, max_tokens=5))[1] == "length", "others go on"

    def answers() -> bool:
        answer = chat(server, structured_outputs={"regex": f"new{{{process.pid}}}|b"}, max_tokens=2)
        assert answer.status_code in (200, 503)
        return answer.status_code == 200

    wait_until(answers)


def test_those_of_no_form_are_as_ever(server: Server) -> None:
    """A greedy answer is the same beside many with a response format."""
    alone = said(chat(server, max_tokens=12))
    formed = {"structured_outputs": {"regex": "[a-z ]{60}"}, "temperature": 1}
    with ThreadPoolExecutor(9) as threads:
        others = [threads.submit(chat, server, **formed) for _ in range(8)]
        assert said(chat(server, max_tokens=12)) == alone
        assert all(re.fullmatch("[a-z ]{60}", said(each.result())[0]) for each in others)
