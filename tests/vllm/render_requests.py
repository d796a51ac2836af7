"""Requests for prompts, drawn at random: dialects, tools, media, roles and options."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.images import in_mode, photo

Rng = np.random.Generator
Request = tuple[str, dict[str, Any]]
"""Dialect and body."""

PATHS = {
    "chat": "/v1/chat/completions/render",
    "completion": "/v1/completions/render",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}
TEXTS = ("What is in the picture?", "Name  the\ncolour – and the shape.", "", "a<|im_end|>b", "é🎈")
FORMATS: dict[str, tuple[str, ...]] = {
    "PNG": ("RGB", "L", "P", "RGBA", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}
_ARGUMENTS = ({}, {"place": "Köln", "days": 3}, {"nested": {"list": [1, 2.5, None, True]}})
_RESULTS = ("21 degrees", "", '{"is_open": true}', "<|im_start|>é")

_SHOWN = """\
{%- macro shown(content) -%}
{%- if content is string %}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'text' %}{{ part['text'] }}
{%- else %}MARKER
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
HERMES = (
    _SHOWN
    + """\
{%- if tools %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{% endif -%}
{%- for document in documents or [] %}<doc>{{ document.title }}: {{ document.text }}</doc>
{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}[user]{% endif %}
<tool_response>{{ shown(message.content) }}</tool_response>
{%- else -%}
[{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{%- endif -%}
{{ shown(message.content) }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' ~ (call.function.arguments | tojson) }}}</tool_call>
{%- endfor -%}
{%- endif %}
{% endfor -%}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined %}<think {{ enable_thinking }}>{% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}
{% endif -%}
"""
)
"""Chat template that writes tools as Hermes models read them."""
MISTRAL = (
    _SHOWN
    + """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first %}{{ raise_exception('the system speaks first') }}{% endif -%}
[SYS]{{ shown(message.content) }}[/SYS]
{%- elif message.role == 'user' -%}
{%- if loop.last and tools is not none %}[TOOLS]{{ tools | tojson(indent=1) }}[/TOOLS]{% endif -%}
[INST]{{ shown(message.content) }}[/INST]
{%- elif message.role == 'tool' -%}
[RESULT]{{ message.tool_call_id }}: {{ shown(message.content) }}[/RESULT]
{%- else -%}
{{ shown(message.content) }}
{%- if message.tool_calls is defined %}[CALLS]{{ message.tool_calls | tojson }}{% endif %}</s>
{%- endif -%}
{%- endfor -%}
"""
)
"""Chat template that writes calls and tools as JSON, and refuses later system messages."""


def use_template(folder: Path, template: str) -> None:
    """Replace a folder's chat template; an item is written as before."""
    path = folder / "chat_template.jinja"
    marker = re.search(r"!= 'text' %\}(.*)\n", path.read_text())
    assert marker is not None
    path.write_text(template.replace("MARKER", marker[1]))


def picture(rng: Rng) -> tuple[str, str]:
    """Return the media type, and a small picture of any mode, size and orientation in base64."""
    source = photo(int(rng.integers(30, 200)), int(rng.integers(30, 200)), int(rng.integers(1000)))
    format_ = str(rng.choice(list(FORMATS)))
    image = in_mode(source, str(rng.choice(FORMATS[format_])))
    options: dict[str, Any] = {}
    if format_ in ("PNG", "JPEG") and rng.integers(3) == 0:
        exif = Image.Exif()
        exif[0x0112] = int(rng.integers(1, 9))
        options["exif"] = exif
    if format_ == "WEBP":
        options["lossless"] = bool(rng.integers(2))
    out = io.BytesIO()
    image.save(out, format_, **options)
    return f"image/{format_.lower()}", base64.b64encode(out.getvalue()).decode()


def request(rng: Rng, *, has_tools: bool = False) -> Request:
    """Return a request of any dialect; ``has_tools`` allows tools, calls and results in it."""
    kind = str(rng.choice(["completion", *["messages", "responses"] * 2, *["chat"] * 7]))
    if kind == "completion":
        return kind, {"model": "tiny", **_completion(rng)}
    body = {"chat": _chat, "messages": _messages, "responses": _responses}[kind](rng, has_tools)
    if _is(rng, 6):  # some prompts leave less space for the answer
        name = {"responses": "max_output_tokens"}.get(kind, "max_tokens")
        body[name] = 256
    return kind, {"model": "tiny", **body}


def _completion(rng: Rng) -> dict[str, Any]:
    texts = [TEXTS[0] * int(rng.integers(1, 4)), TEXTS[1], TEXTS[3]]
    tokens = [[int(each) for each in rng.integers(20, 250, 9)] for _ in range(2)]
    body: dict[str, Any] = {"prompt": _of(rng, (texts[0], texts, tokens[0], tokens))}
    if _is(rng, 3):
        body["add_special_tokens"] = bool(rng.integers(2))
    if rng.integers(2):
        body["truncate_prompt_tokens"] = _of(rng, (-1, 3, 5, 9, 100))
        if rng.integers(2):
            body["truncation_side"] = _of(rng, ("left", "right"))
    return body


def _is(rng: Rng, one_in: int) -> bool:
    return bool(rng.integers(one_in) == 0)


def _text(rng: Rng) -> str:
    return TEXTS[int(rng.integers(len(TEXTS)))]


def _of(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _function(rng: Rng, number: int, key: str) -> dict[str, Any]:
    properties = {"place": {"type": "string", "description": "Ort – wo?"}, "days": {"minimum": 1.0}}
    function: dict[str, Any] = {"name": f"tool_{number}"}
    if rng.integers(2):
        function["description"] = _of(rng, ("Find <it>.", "Größe & Form", ""))
    if key == "input_schema" or rng.integers(3):
        schema = {"properties": properties, "required": ["place"]}
        function[key] = schema if _is(rng, 3) else {"type": "object", **schema}
    if _is(rng, 4):
        function["strict"] = bool(rng.integers(2))
    return function


def _functions(rng: Rng, key: str = "parameters") -> list[dict[str, Any]]:
    return [_function(rng, number, key) for number in range(int(rng.integers(1, 4)))]


def _image_part(rng: Rng) -> dict[str, Any]:
    media_type, data = picture(rng)
    part = {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    if _is(rng, 5):
        part["image_url"]["detail"] = _of(rng, ("low", "high"))  # type: ignore[index]
    return part


def _chat(rng: Rng, has_tools: bool) -> dict[str, Any]:
    body: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    if _is(rng, 3):
        messages.append({"role": _of(rng, ("system", "system", "developer")), "content": "Short."})
    for turn in range(int(rng.integers(1, 3))):
        if turn:
            messages += _chat_answer(rng, has_tools)
        parts: list[Any] = []
        for _ in range(int(rng.integers(0, 4))):
            parts.append(_image_part(rng))
            if rng.integers(2):
                parts.append({"type": "text", "text": _text(rng)})
        parts.append({"type": "text", "text": _text(rng)})
        messages.append({"role": "user", "content": parts})
    if has_tools and _is(rng, 2):
        tools = [{"type": "function", "function": each} for each in _functions(rng)]
        named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}  # type: ignore[index]
        body["tools"] = tools
        if rng.integers(2):
            body["tool_choice"] = _of(rng, ("auto", "none", "required", named))
    if has_tools and _is(rng, 6):
        body["documents"] = [{"title": "Titel", "text": _text(rng)}]
    if _is(rng, 6):
        body["chat_template_kwargs"] = {"enable_thinking": bool(rng.integers(2)), "unknown": [1]}
    if _is(rng, 6):
        body["reasoning_effort"] = _of(rng, ("none", "low", "high"))
    if _is(rng, 8):
        messages.append({"role": "assistant", "content": "it is a "})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return {"messages": messages, **body}


def _chat_answer(rng: Rng, has_tools: bool) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": "a red circle"}
    if not has_tools or _is(rng, 3):
        return [answer]
    if rng.integers(2):
        answer["content"] = None
    if _is(rng, 3):
        answer[_of(rng, ("reasoning", "reasoning_content"))] = "I look."
    number = int(rng.integers(1, 3))
    answer["tool_calls"] = [
        {
            "type": "function",
            "id": f"call_{index}",
            "function": {"name": "tool_0", "arguments": _arguments(rng)},
        }
        for index in range(number)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{index}", "content": _chat_result(rng)}
        for index in range(number)
    ]
    return [answer, *results]


def _arguments(rng: Rng) -> str:
    return str(_of(rng, ("", "[1]", "{broken", *(json.dumps(each) for each in _ARGUMENTS))))


def _chat_result(rng: Rng) -> Any:
    texts = [{"type": "text", "text": str(_of(rng, _RESULTS))} for _ in range(2)]
    return _of(rng, (_of(rng, _RESULTS), texts, [*texts, _image_part(rng)]))


def _block(rng: Rng) -> dict[str, Any]:
    media_type, data = picture(rng)
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


def _messages(rng: Rng, has_tools: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 16}
    if rng.integers(2):
        header = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
        blocks = [header, {"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]
        body["system"] = _of(rng, ("Answer shortly.", blocks))
    messages: list[dict[str, Any]] = []
    for turn in range(int(rng.integers(1, 3))):
        first: list[dict[str, Any]] = []
        if turn:
            answer, first = _message_answer(rng, has_tools)
            messages.append({"role": "assistant", "content": answer})
            if _is(rng, 4):
                messages.append({"role": "system", "content": "A reminder."})
        images = [_block(rng) for _ in range(int(rng.integers(0, 3)))]
        text = {"type": "text", "text": _text(rng) or "?"}
        messages.append({"role": "user", "content": [*first, *images, text]})
    if has_tools and rng.integers(2):
        body["tools"] = _functions(rng, "input_schema")
        if rng.integers(2):
            choices = ("auto", "any", "none")
            body["tool_choice"] = {"type": _of(rng, choices)}
    if _is(rng, 5):
        body["thinking"] = {"type": "disabled"}
    if _is(rng, 5):
        body["output_config"] = {"effort": "low"}
    if _is(rng, 8):
        messages.append({"role": "assistant", "content": "it is a"})
    return {"messages": messages, **body}


def _message_answer(rng: Rng, has_tools: bool) -> tuple[list[Any], list[Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "a red circle"}]
    if not has_tools or _is(rng, 3):
        return blocks, []
    if _is(rng, 3):
        blocks.insert(0, {"type": "thinking", "thinking": "I look.", "signature": "s"})
    number = int(rng.integers(1, 3))
    inner = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for index in range(number):
        called = {"id": f"call_{index}", "name": "tool_0", "input": _of(rng, _ARGUMENTS)}
        blocks.append({"type": "tool_use", **called})
    results = [
        {
            "type": "tool_result",
            "tool_use_id": f"call_{index}",
            "content": _of(rng, (str(_of(rng, _RESULTS)), inner, [*inner, _block(rng)])),
        }
        for index in range(number)
    ]
    return blocks, results


def _responses(rng: Rng, has_tools: bool) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if rng.integers(2):
        body["instructions"] = "Answer shortly."
    if has_tools and rng.integers(2):
        body["tools"] = [{"type": "function", **each} for each in _functions(rng)]
        if _is(rng, 4):
            body["tools"].append({"type": "custom", "name": "free", "description": "any text"})
        if rng.integers(2):
            body["tool_choice"] = _of(rng, ("auto", "none", "required"))
    if _is(rng, 5):
        body["reasoning"] = {"effort": _of(rng, ("low", "high"))}
    if _is(rng, 5):
        return {"input": _text(rng) or "?", **body}
    items: list[dict[str, Any]] = []
    for turn in range(int(rng.integers(1, 3))):
        if turn:
            items += _items(rng, has_tools)
        parts: list[dict[str, Any]] = []
        for _ in range(int(rng.integers(0, 3))):
            media_type, data = picture(rng)
            url = f"data:{media_type};base64,{data}"
            parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
        parts.append({"type": "input_text", "text": _text(rng)})
        items.append({"role": "user", "content": parts})
    return {"input": items, **body}


def _items(rng: Rng, has_tools: bool) -> list[dict[str, Any]]:
    parts = [{"type": "output_text", "text": "a red circle", "annotations": []}]
    said = {"type": "message", "role": "assistant", "content": _of(rng, (parts, "a circle"))}
    if not has_tools or _is(rng, 3):
        return [said]
    items: list[dict[str, Any]] = []
    if _is(rng, 3):
        thought = [{"type": "reasoning_text", "text": "I look."}]
        items.append({"type": "reasoning", "summary": [], "content": thought})
    items += [said] if rng.integers(2) else []
    number = int(rng.integers(1, 3))
    for index in range(number):
        call = {"call_id": f"call_{index}", "name": "tool_0", "arguments": _arguments(rng)}
        items.append({"type": "function_call", **call})
    texts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    for index in range(number):
        output = _of(rng, (_of(rng, _RESULTS), texts))
        result = {"call_id": f"call_{index}", "output": output}
        items.append({"type": "function_call_output", **result})
    return items
