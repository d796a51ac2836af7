"""Questions for three APIs, and a comparable form of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afferent.conformance.images import DrawnImage, draw_image
from tests.images import encoded, in_mode
from tests.server import data_url

TEXTS = (
    "What is in the picture?",
    "Name the colour and the shape.",
    "What do you see? Answer shortly.",
    "",
)
TOOL = {
    "name": "look",
    "description": "Look at something.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}},
        "required": ["colour"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square", "star"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
_NUM_DIFFERENT = 40
_KINDS = ("plain", "plain", "tool", "schema")
_ALL_KINDS = (*_KINDS, "choices", "logprobs")
_FORMATS = {
    "png": ("RGB", "L", "P", "RGBA", "LA", "1"),
    "jpeg": ("RGB", "L"),
    "webp": ("RGB", "RGBA"),
    "gif": ("P", "L"),
}
"""Formats of files, each with modes of Pillow."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question; with ``aborts``, the client leaves after this many bytes of the answer."""

    path: str
    body: Mapping[str, Any]
    is_stream: bool
    aborts: int | None = None


@dataclass(slots=True)
class Said:
    """The part of an answer that does not depend on its time and on the server.

    Attributes:
        logprobs: Log-probabilities of the tokens, which are equal in part only.
    """

    status: int
    texts: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list, compare=False)


def questions(number: int, seed: int, model: str, *, are_varied: bool = False) -> list[Question]:
    """Return questions about 1 to 4 images each; many of the images are repeated.

    Args:
        are_varied: Files have several formats and modes, and some questions of chat ask for three
            answers, or for log-probabilities.
    """
    rng = np.random.default_rng(seed)
    drawn = [draw_image(rng) for _ in range(_NUM_DIFFERENT)]
    pictures = [_varied_url(each, rng) if are_varied else data_url(each) for each in drawn]
    kinds = _ALL_KINDS if are_varied else _KINDS
    made = []
    for index in range(number):
        shown = [pictures[int(at)] for at in rng.integers(0, _NUM_DIFFERENT, rng.integers(1, 5))]
        text = TEXTS[int(rng.integers(len(TEXTS)))]
        dialect = ("chat", "responses", "messages")[index % 3]
        is_stream = bool(rng.integers(2))
        kind = kinds[int(rng.integers(len(kinds)))]
        body = _BODIES[dialect](model, shown, text, kind, is_stream)
        aborts = int(rng.integers(0, 400)) if rng.integers(12) == 0 else None
        made.append(Question(_PATHS[dialect], body, is_stream, aborts))
    return made


def _varied_url(picture: DrawnImage, rng: np.random.Generator) -> str:
    kind = str(rng.choice(list(_FORMATS)))
    image = in_mode(picture.image, str(rng.choice(_FORMATS[kind])))
    return data_url(encoded(image, kind.upper()), kind)


def with_data(question: Question, rng: np.random.Generator) -> Question:
    """Return the question with URLs in fields without media, which reach vLLM unchanged."""
    body = dict(question.body)
    urls = [f"https://example.org/{int(number)}.png" for number in rng.integers(1000, size=3)]
    look_alike = {"image_url": urls[0], "video_url": urls[1], "audio_url": urls[2]}
    body["metadata"] = look_alike
    if "tools" in body:
        tool = {**TOOL, "parameters": {**TOOL["parameters"], "examples": [look_alike]}}
        schema = {"name": TOOL["name"], "input_schema": tool["parameters"]}
        is_chat = question.path == _PATHS["chat"]
        body["tools"] = [{"type": "function", "function": tool} if is_chat else schema]
    if question.path == _PATHS["messages"] and rng.integers(2):
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": look_alike}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "seen"}
        body["messages"] = [
            *body["messages"],
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    if question.path == _PATHS["chat"]:
        body["chat_template_kwargs"] = {"image_url": {"url": urls[0]}, "images": urls}
    return Question(question.path, body, question.is_stream, question.aborts)


_PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def _chat(
    model: str, shown: Sequence[str], text: str, kind: str, is_stream: bool
) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": is_stream,
    }
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    if kind == "tool":
        body |= {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    if kind == "schema":
        schema = {"name": "shape", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if kind == "choices":
        body |= {"n": 3, "temperature": 0.8, "seed": len(text)}
    if kind == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 2}
    return body


def _responses(
    model: str, shown: Sequence[str], text: str, kind: str, is_stream: bool
) -> dict[str, Any]:
    parts: list[Any] = [
        {"type": "input_image", "image_url": url, "detail": "auto"} for url in shown
    ]
    body: dict[str, Any] = {
        "model": model,
        "input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}],
        "max_output_tokens": 24,
        "temperature": 0,
        "stream": is_stream,
        "store": False,
    }
    if kind == "schema":
        body["text"] = {"format": {"type": "json_schema", "name": "shape", "schema": SCHEMA}}
    return body


def _messages(
    model: str, shown: Sequence[str], text: str, kind: str, is_stream: bool
) -> dict[str, Any]:
    parts: list[Any] = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": url[len("data:") : url.index(";")],
                "data": url.partition(",")[2],
            },
        }
        for url in shown
    ]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text or "?"}]}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": is_stream,
    }
    if kind == "tool":
        tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
        body |= {"tools": [tool], "tool_choice": {"type": "any"}}
    return body


_BODIES = {"chat": _chat, "responses": _responses, "messages": _messages}


def said(question: Question, status: int, text: str) -> Said:
    """Parse an answer; of a refusal, take the message."""
    result = Said(status)
    if status != 200:
        result.texts.append(text)
        return result
    if not question.is_stream:
        _READERS[question.path](json.loads(text), result)
        return result
    for event in text.split("\n\n"):
        data = "\n".join(
            line.removeprefix("data:").strip()
            for line in event.splitlines()
            if line.startswith("data:")
        )
        if data and data != "[DONE]":
            _read_event(question.path, json.loads(data), result)
    if question.path != _PATHS["chat"]:  # else by choice already
        result.texts = ["".join(result.texts)] if result.texts else []
    result.ends.sort()
    result.tools = ["".join(result.tools)] if result.tools else []
    return result


def _read_chat(body: Any, result: Said) -> None:
    for choice in body["choices"]:
        message = choice["message"]
        result.texts.append(message["content"] or "")
        calls = message.get("tool_calls") or []
        result.tools += [f"{c['function']['name']}{c['function']['arguments']}" for c in calls]
        result.ends.append(choice["finish_reason"])
        result.logprobs += _logprobs(choice)
    result.prompt_tokens.append(body["usage"]["prompt_tokens"])


def _logprobs(choice: Any) -> list[float]:
    tokens = (choice.get("logprobs") or {}).get("content") or []
    return [top["logprob"] for token in tokens for top in (token, *token["top_logprobs"])]


def _read_responses(body: Any, result: Said) -> None:
    for item in body["output"]:
        if item["type"] == "message":
            result.texts += [part["text"] for part in item["content"]]
        elif item["type"] == "reasoning":
            result.texts += [part["text"] for part in item.get("content") or []]
    result.ends.append(body["status"])
    result.prompt_tokens.append(body["usage"]["input_tokens"])


def _read_messages(body: Any, result: Said) -> None:
    for block in body["content"]:
        if block["type"] == "text":
            result.texts.append(block["text"])
        elif block["type"] == "tool_use":
            result.tools.append(f"{block['name']}{json.dumps(block['input'])}")
    result.ends.append(body["stop_reason"])
    result.prompt_tokens.append(body["usage"]["input_tokens"])


_READERS = {
    "/v1/chat/completions": _read_chat,
    "/v1/responses": _read_responses,
    "/v1/messages": _read_messages,
}


def _read_event(path: str, event: Any, result: Said) -> None:
    if "error" in event:
        result.ends.append(f"error {json.dumps(event['error'])}")
        return
    if path == "/v1/chat/completions":
        for choice in event["choices"]:
            delta, index = choice["delta"], choice["index"]
            result.texts += [""] * (index + 1 - len(result.texts))
            result.texts[index] += delta.get("content") or ""
            result.logprobs += _logprobs(choice)
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                result.tools += [function.get("name") or "", function.get("arguments") or ""]
            if choice["finish_reason"]:
                result.ends.append(choice["finish_reason"])
        if event.get("usage"):
            result.prompt_tokens.append(event["usage"]["prompt_tokens"])
        return
    kind = event.get("type", "")
    if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
        result.texts.append(event["delta"])
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        result.ends.append(event["response"]["status"])
        result.prompt_tokens.append(event["response"]["usage"]["input_tokens"])
    elif kind == "content_block_delta":
        delta = event["delta"]
        result.texts.append(delta.get("text", ""))
        result.tools.append(delta.get("partial_json", ""))
    elif kind == "content_block_start":
        result.tools.append(event["content_block"].get("name", ""))
    elif kind == "message_delta":
        result.ends.append(event["delta"]["stop_reason"])
    elif kind == "message_start":
        result.prompt_tokens.append(event["message"]["usage"]["input_tokens"])
