"""Prompts that begin like an earlier one: computed once, for one tenant alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afferent.conformance.images import DrawnImage
from tests import plain_http
from tests.end_to_end.naming import QUESTION
from tests.images import encoded
from tests.server import Server, data_url

pytestmark = pytest.mark.timeout(300)

KEYS = {name: f"key-of-{name}-{'x' * 20}" for name in ("anna", "ben")}
SETTINGS = "".join(
    f'[[tenants]]\nname = "{name}"\napi_keys = ["{key}"]\n' for name, key in KEYS.items()
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LATER = "Which shape did you see? Answer with one word."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file: Path = tmp_path_factory.mktemp("settings") / "afferent.toml"
    file.write_text(SETTINGS)
    with Server("--config", str(file)) as running:
        yield running


def send(server: Server, path: str, body: dict[str, Any], tenant: str) -> Any:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    body = {"model": "shapes", "temperature": 0, **body}
    answer = plain_http.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server: Server, messages: list[Any], tenant: str) -> tuple[str, int, int]:
    """Return the answer, the tokens of the prompt, and those that were cached."""
    found = send(server, CHAT, {"messages": messages, "max_tokens": 12}, tenant)
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def question(picture: DrawnImage | bytes) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_url(picture, "png")}}
    return {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}


def test_a_conversation_is_computed_once_for_each_tenant(
    server: Server, pictures: list[DrawnImage]
) -> None:
    said: list[Any] = []
    known = 0
    for turn, picture in enumerate([pictures[0], None, pictures[1], None]):
        said.append(question(picture) if picture else {"role": "user", "content": LATER})
        answer, prompt, cached = chat(server, said, "anna")
        assert cached >= known - 1, "all but the last token of the answer before it"
        assert (cached > 0) == (turn > 0)
        said.append({"role": "assistant", "content": answer})
        known = prompt
    again = said[:-1]
    answer, prompt, cached = chat(server, again, "anna")
    assert (answer, cached) == (said[-1]["content"], prompt - 1)
    answer, _, cached = chat(server, again, "ben")
    assert (answer, cached) == (said[-1]["content"], 0), "another tenant's prompts are not found"
    assert server.metrics()["afferent_engine_cached_tokens_total"] > prompt


def test_another_picture_is_another_prompt(server: Server, pictures: list[DrawnImage]) -> None:
    one, other = (encoded(each.image.resize((128, 128)), "PNG") for each in pictures)
    _, prompt, _ = chat(server, [question(one)], "ben")
    _, same_size, cached = chat(server, [question(other)], "ben")
    assert prompt == same_size
    assert cached < prompt // 4, "at most the tokens before the picture"


def test_a_stored_conversation(server: Server, pictures: list[DrawnImage]) -> None:
    image = {"type": "input_image", "image_url": data_url(pictures[0], "png")}
    text = {"type": "input_text", "text": QUESTION}
    body: dict[str, Any] = {"input": [{"role": "user", "content": [image, text]}]}
    first = send(server, RESPONSES, body, "ben")
    more = {"input": LATER, "previous_response_id": first["id"]}
    usage = send(server, RESPONSES, more, "ben")["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_messages_count_cached_tokens_apart(server: Server, pictures: list[DrawnImage]) -> None:
    data = data_url(pictures[0], "png").split(",", 1)[1]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    body: dict[str, Any] = {
        "max_tokens": 8,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": content}],
    }
    first = send(server, MESSAGES, body, "anna")["usage"]
    second = send(server, MESSAGES, body, "anna")["usage"]
    assert second["input_tokens"] == 1
    assert second["cache_read_input_tokens"] + 1 == first["input_tokens"]
    assert first["cache_read_input_tokens"] == 0
