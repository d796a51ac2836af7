"""Wrong requests: the exact message says what is wrong and what is right."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from PIL import Image

from afferent.media.headers.image_format import ALL_FORMATS
from tests import plain_http
from tests.pages import ROOT
from tests.server import Server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
HI: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"model": "shapes", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "shapes", "input": "hi"},
    MESSAGES: {
        "model": "shapes",
        "max_tokens": 20,
        "messages": [{"role": "user", "content": "hi"}],
    },
    COMPLETIONS: {"model": "shapes", "prompt": "hi"},
}
BARE = base64.b64encode((ROOT / "docs" / "pictures" / "one.jpg").read_bytes()).decode()
LEFT_OUT = object()
"""The value of a parameter that is not sent."""


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def image(url: Any) -> dict[str, Any]:
    return {"messages": user({"type": "image_url", "image_url": {"url": url}})}


def pcx() -> str:
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, "PCX")
    return "data:image/pcx;base64," + base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        # The body
        (CHAT, b"", "the body is not valid JSON"),
        (CHAT, b"model=shapes&prompt=hi", "the body is not valid JSON"),
        (CHAT, b"[]", "the body must be an object, not a list"),
        (CHAT, {"model": LEFT_OUT}, "model is missing"),
        (CHAT, {"model": "gpt-4o"}, "the model 'gpt-4o' is not served here: 'shapes' is"),
        (CHAT, {"messages": LEFT_OUT}, "messages is missing"),
        (CHAT, {"messages": "hi"}, "messages must be a list, not text"),
        (
            RESPONSES,
            {"input": LEFT_OUT},
            "input is missing; without it, previous_response_id or conversation is needed",
        ),
        (MESSAGES, {"max_tokens": LEFT_OUT}, "max_tokens is missing"),
        # Parameters
        (CHAT, {"temperature": 3}, "temperature must be between 0 and 2"),
        (MESSAGES, {"temperature": 1.5}, "temperature must be between 0 and 1"),
        (CHAT, {"top_p": 0}, "top_p must be more than 0"),
        (CHAT, {"top_k": 0.5}, "top_k must be a whole number, not a fraction"),
        (CHAT, {"n": 0}, "n must be between 1 and 16"),
        (CHAT, {"stream": "true"}, "stream must be true or false, not text"),
        (
            CHAT,
            {"stream_options": True},
            "stream_options must be an object, not true or false; it may have include_usage",
        ),
        (CHAT, {"top_logprobs": 5}, "top_logprobs needs logprobs"),
        (
            CHAT,
            {"max_token": 5},
            "there is no parameter 'max_token': is it 'max_tokens' that is meant?",
        ),
        (
            RESPONSES,
            {"max_tokens": 5},
            "there is no parameter 'max_tokens': is it 'max_output_tokens' that is meant?",
        ),
        (
            MESSAGES,
            {"stop": ["."]},
            "stop: there is no parameter 'stop': is it 'stop_sequences' that is meant?",
        ),
        (
            CHAT,
            {"tool_choice": "required"},
            "tool_choice needs tools",
        ),
        (
            CHAT,
            {"max_tokens": 32_768, "min_tokens": 32_768},
            "the prompt has 9 tokens and 32768 were asked for; the model has room for 32768 in all",
        ),
        (COMPLETIONS, {"prompt": ["one", "two"]}, "a request has one prompt"),
        # Messages
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0] needs content"),
        (
            CHAT,
            {"messages": [{"role": "User", "content": "hi"}]},
            "messages[0].role can't be 'User': it is assistant, developer, function, system, tool "
            "or user",
        ),
        (CHAT, {"messages": user("hi")}, "messages[0].content[0] must be an object, not text"),
        (
            CHAT,
            {"messages": user({"type": "image", "image": BARE})},
            "messages[0].content[0].type can't be 'image': it is text, refusal, image_url, "
            "video_url, audio_url, input_audio or file",
        ),
        (
            RESPONSES,
            {"input": user({"type": "text", "text": "hi"})},
            "input[0].content[0].type can't be 'text': it is input_text, output_text, refusal, "
            "input_image, input_file or input_audio",
        ),
        (
            CHAT,
            {"messages": user({"type": "image_url", "image_url": "https://example.com/a.png"})},
            "messages[0].content[0].image_url must be an object, not text; it may have url or "
            "detail",
        ),
        (
            MESSAGES,
            {"messages": user({"type": "image", "source": {"type": "base64", "data": BARE}})},
            "messages[0].content[0].source lacks media_type",
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": image(BARE)["messages"][0]["content"]}]},
            "media stand in messages of the user and of tools, and messages[0] is the system's",
        ),
        (
            CHAT,
            {"continue_final_message": True},
            "there is nothing to go on with: the last message is the user's, and not the "
            "assistant's",
        ),
        # Media
        (
            CHAT,
            image(BARE),
            "this is base64, and no URL: put data:image/...;base64, in front of it",
        ),
        (
            CHAT,
            image("data:image/png," + BARE),
            "a data: URL has the form data:image/...;base64,...",
        ),
        (CHAT, image("data:image/png;base64,%%%%"), "the base64 of item 1 is malformed"),
        (
            CHAT,
            image("docs/pictures/one.jpg"),
            "media URLs are https:, http: or data:",
        ),
        (
            CHAT,
            image("http://example.com:8080/a.png"),
            "media are fetched from ports 80 and 443 only; others are allowed by the server's "
            "--fetch-allow example.com:8080",
        ),
        (
            CHAT,
            image("http://127.0.0.1/a.png"),
            "the media host's address is not a public one; others are allowed by the server's "
            "--fetch-allow HOST:PORT",
        ),
        (
            CHAT,
            image("http://localhost/a.png"),
            "the media host's name was not found, or leads to no public address",
        ),
        (
            CHAT,
            image("file:///etc/passwd"),
            "files are read below the folders of the server's --file-roots only",
        ),
        (CHAT, image(pcx()), f"the bytes are not those of a {ALL_FORMATS} image"),
        (
            CHAT,
            image(f"data:image/jpeg;base64,{BARE[:2000]}"),
            "the image can't be decoded: its data are truncated or corrupt",
        ),
        (
            CHAT,
            {"messages": user({"type": "input_audio", "input_audio": {"data": "AAAA"}})},
            "the model takes no audio",
        ),
        (
            RESPONSES,
            {"previous_response_id": "resp_gone"},
            "the response 'resp_gone' is not kept: it was not to be stored, its conversation has "
            "more than 262144 bytes or 4096 messages and parts, or it had to make room; send the "
            "conversation's messages again",
        ),
    ],
)
def test_a_mistake(server: Server, path: str, given: Any, message: str) -> None:
    body = given
    if isinstance(given, dict):
        merged = {**HI[path], **given}
        body = json.dumps({k: v for k, v in merged.items() if v is not LEFT_OUT}).encode()
    answer = plain_http.post(f"{server.url}{path}", content=body, timeout=60)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"] == message


def test_base64_may_have_line_breaks(server: Server) -> None:
    lines = base64.encodebytes(base64.b64decode(BARE)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{lines}"}}
    question = {"type": "text", "text": "What is in the picture?"}
    answer = server.post({"model": "shapes", "messages": user(part, question)})
    assert answer.json()["choices"][0]["message"]["content"] == "a red circle"


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", CHAT, "the endpoint has no such method"),
        (
            "POST",
            "/v1/chat/completion",
            "there is no such endpoint; GET /openapi.json lists them",
        ),
        (
            "GET",
            "/v1/models/gpt-4o",
            "the model 'gpt-4o' is not served here: 'shapes' is",
        ),
    ],
)
def test_a_wrong_address(server: Server, method: str, path: str, message: str) -> None:
    answer = plain_http.request(method, f"{server.url}{path}", timeout=60)
    assert answer.json()["error"]["message"] == message
