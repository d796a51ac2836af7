"""Requests of OpenAI Responses for a prompt, as vLLM reads them: as chat completions.

Source: ``vllm.entrypoints.openai.responses`` of vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from afferent.builtin.apis.rendering.prompt_request import (
    Conversation,
    PromptRequest,
    Tools,
)
from afferent.builtin.apis.rendering.vllm_turns import Turn
from afferent.builtin.apis.tools import Function, read_tool
from afferent.builtin.pipeline.request import VllmRules
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.media.body.raw import RawMedia

_WHERE = "a tool"
_BEGUN = ("in_progress", "incomplete")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_FREE_TEXT = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters that vLLM gives a custom tool, whose input is free text."""


class _Effort(Struct):
    effort: str | None = None


class _Namespace(Struct):
    name: str
    tools: list[dict[str, Any]] | None = None


class ResponsesPrompt(PromptRequest, kw_only=True):
    """Request of the Responses API whose prompt is requested."""

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {
        "previous_response_id": (),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "truncation": ("disabled",),
        "prompt": (),
    }

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    reasoning: _Effort | None = None
    max_output_tokens: int | None = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_output_tokens

    def content(self, media: Mapping[str, RawMedia], rules: VllmRules) -> Conversation:
        turns = [Turn(role="system", content=self.instructions)] if self.instructions else []
        items = [{"role": "user", "content": self.input}]
        items = items if isinstance(self.input, str) else self.input
        for index, item in enumerate(items):
            _add(turns, item, f"input[{index}]")
        last = items[-1]
        is_begun = last.get("type", "message") in ("message", "reasoning") and (
            last.get("status") in _BEGUN
        )
        is_excluded = self.tool_choice == "none" and rules.excludes_unused_tools
        return Conversation(
            turns=turns,
            tools=None if is_excluded else _tools(self.tools or ()),
            effort=self.reasoning.effort if self.reasoning is not None else None,
            begins_answer=not is_begun,
            continues_last=is_begun,
        )


def _tools(given: Sequence[dict[str, Any]]) -> Tools | None:
    """Return the functions among the tools; vLLM renders no other ones."""
    if not given:
        return None
    functions: list[Function] = []
    for tool in given:
        match tool.get("type"):
            case "function":
                functions.append(_function(tool))
            case "custom":
                functions.append(_function({**tool, "parameters": _FREE_TEXT}))
            case "namespace":
                space = read_tool(tool, _Namespace, _WHERE)
                named = [each for each in space.tools or () if each.get("type") == "function"]
                functions += [_function(each, f"{space.name}__") for each in named]
    return [function.as_tool() for function in functions]


def _function(tool: dict[str, Any], prefix: str = "") -> Function:
    function = read_tool(tool, Function, _WHERE)
    function.name = prefix + function.name
    return function


def _add(turns: list[Turn], item: dict[str, Any], where: str) -> None:
    """Add an item: to the assistant's message before it, or as a message of its own."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind in ("function_call", "custom_tool_call"):
        _add_call(_assistant(turns, "tool_calls"), item, where)
    elif kind == "reasoning":
        _assistant(turns, "reasoning").reasoning = _reasoning(item, where)
    elif kind in _OUTPUTS:
        output, call_id = item.get("output"), item.get("call_id")
        turns.append(_turn({"role": "tool", "content": output, "tool_call_id": call_id}, where))
    elif role == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _assistant(turns, "content").content = text
    elif role is not None:
        turns.append(_turn({"role": role, "content": item.get("content")}, where))
    else:
        raise UnsupportedParameter(
            f"items of type {str(kind)[:64]!r} are not supported", param=where
        )


def _assistant(turns: list[Turn], name: str) -> Turn:
    """Return the assistant's message to write a field of: the last one, if it has room for it."""
    is_last = bool(turns) and turns[-1].role == "assistant"
    if not is_last or (name != "tool_calls" and getattr(turns[-1], name) is not None):
        turns.append(Turn(role="assistant"))
    return turns[-1]


def _add_call(turn: Turn, item: dict[str, Any], where: str) -> None:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}: a call of a tool has a name", param=where)
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    elif item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    function = {"name": name, "arguments": arguments}
    call = {"id": item.get("call_id"), "function": function, "type": "function"}
    turn.tool_calls = [*(turn.tool_calls or ()), call]


def _reasoning(item: dict[str, Any], where: str) -> str:
    if item.get("encrypted_content"):
        raise UnsupportedParameter(f"{where}: encrypted content is not supported", param=where)
    return _first_text(item.get("content")) or _first_text(item.get("summary")) or ""


def _first_text(content: Any) -> str | None:
    """Return the text; of parts, vLLM reads the first one alone."""
    if isinstance(content, str):
        return content
    first = content[0] if isinstance(content, list) and content else None
    text = first.get("text") if isinstance(first, dict) else None
    return text if isinstance(text, str) else None


def _turn(given: dict[str, Any], where: str) -> Turn:
    try:
        return msgspec.convert(given, Turn)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from error
