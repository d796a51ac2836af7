"""Error messages for invalid values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afferent.builtin.apis.chat.api import OpenAIChat
from afferent.errors import InvalidRequest
from afferent.media.body.received import ReceivedBody

API = OpenAIChat()
GOOD: dict[str, Any] = {"model": "shapes", "messages": [{"role": "user", "content": "hi"}]}


def content(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def refusal(body: Any) -> InvalidRequest:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as caught:
        API.parse(ReceivedBody(text, {}, len(text)), request_id="r", model="shapes")
    return caught.value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": 3}, "temperature must be between 0 and 2"),
        ({"temperature": -0.1}, "temperature must be between 0 and 2"),
        ({"temperature": "hot"}, "temperature must be a number, not text"),
        ({"top_p": 0}, "top_p must be more than 0"),
        ({"top_p": 1.5}, "top_p must be at most 1"),
        ({"top_k": 1.5}, "top_k must be a whole number, not a fraction"),
        ({"min_p": 2}, "min_p must be between 0 and 1"),
        ({"frequency_penalty": 3}, "frequency_penalty must be between -2 and 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be more than 0"),
        ({"logit_bias": {"1": 500}}, "logit_bias must be at most 100"),
        ({"logit_bias": {"x": 1}}, "a name in logit_bias must be a whole number, not text"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and 1,048,576"),
        ({"n": 17}, "n must be between 1 and 16"),
        ({"stream": "yes"}, "stream must be true or false, not text"),
        ({"stop": ["a"] * 5}, "stop must have at most 4 entries"),
        ({"stop": ""}, "stop must have at least 1 character"),
        ({"stop": 5}, "stop must be text or a list, not a whole number"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1] must be at least 0"),
        ({"model": None}, "model must be text, not null"),
        ({"messages": []}, "messages must have at least 1 entry"),
        ({"messages": None}, "messages must be a list, not null"),
        ({"messages": [{"content": "a"}]}, "messages[0] lacks role"),
        (
            {"messages": [{"role": "x", "content": "a"}]},
            "messages[0].role can't be 'x': it is assistant, developer, function, system, tool or "
            "user",
        ),
        (
            {"messages": content({"type": "text"})},
            "messages[0].content[0] lacks text",
        ),
        (
            {"messages": content({"type": "image", "image": "x"})},
            "messages[0].content[0].type can't be 'image': it is text, refusal, image_url, "
            "video_url, audio_url, input_audio or file",
        ),
        (
            {"messages": content({"type": "image_url", "image_url": "https://a/b"})},
            "messages[0].content[0].image_url must be an object, not text; it may have url or "
            "detail",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_values(given: dict[str, Any], words: str) -> None:
    wrong = refusal({**GOOD, **given})
    assert wrong.message == words
    assert wrong.param == next(iter(given))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the body must be an object, not a list"),
        ({"model": "shapes"}, "messages is missing"),
        ({"messages": GOOD["messages"]}, "model is missing"),
        (b"{", "the body is not valid JSON"),
    ],
)
def test_the_whole(body: Any, words: str) -> None:
    assert refusal(body).message == words
