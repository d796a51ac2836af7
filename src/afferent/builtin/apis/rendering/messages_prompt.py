"""Requests of Anthropic Messages for a prompt, as vLLM reads them: as chat completions.

Source: ``vllm.entrypoints.anthropic.serving`` of vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from afferent.builtin.apis import schema
from afferent.builtin.apis.messages.tools import AnthropicTool
from afferent.builtin.apis.rendering.prompt_request import (
    Conversation,
    PromptRequest,
    Tools,
)
from afferent.builtin.apis.rendering.vllm_turns import BILLING_HEADER, Turn
from afferent.builtin.pipeline.request import VllmRules
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.media.body.raw import RawMedia

_CHANGES = ("tool_addition", "tool_removal")


class _Source(Struct):
    """Image: its ``data`` in base64, or a ``url``."""

    type: str = "base64"
    media_type: str = "image/jpeg"
    data: str = ""
    url: str = ""


class _Change(Struct, kw_only=True):
    """Tool that a block adds or removes, by name or by value."""

    type: Literal["tool_reference", "tool_definition"]
    name: str = ""
    definition: AnthropicTool | None = None


class _Inner(Struct, kw_only=True):
    """Block of a tool's result."""

    type: str = ""
    text: str = ""
    source: _Source | None = None
    name: str | None = None
    tool_name: str | None = None


class Block(Struct, kw_only=True):
    """Block of a message; the type says which keys have a meaning."""

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: _Source | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[_Inner] | None = None
    thinking: str | None = None
    tool: _Change | None = None


class AnthropicTurn(Struct, kw_only=True):
    """Message of the Messages API."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class _ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]


class _Effort(Struct):
    effort: str | None = None


class _Thinking(Struct):
    type: str


class CountPrompt(PromptRequest, kw_only=True):
    """Conversation of the Messages API whose tokens are counted."""

    messages: Annotated[list[AnthropicTurn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _Effort | None = None
    thinking: _Thinking | None = None

    @property
    def answer_tokens(self) -> int | None:
        return 1

    def content(self, media: Mapping[str, RawMedia], rules: VllmRules) -> Conversation:
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is not None and self.thinking.type == "disabled":
            effort = "none"
        is_unused = self.tool_choice is not None and self.tool_choice.type == "none"
        is_excluded = is_unused and rules.excludes_unused_tools
        return Conversation(
            turns=list(self._turns(media, merges_system=rules.merges_system)),
            tools=None if is_excluded else self._tools(),
            effort=effort,
        )

    def _turns(self, media: Mapping[str, RawMedia], *, merges_system: bool) -> Iterator[Turn]:
        inline = [turn for turn in self.messages if turn.role == "system"]
        texts = _texts(self.system) if isinstance(self.system, list) else [self.system or ""]
        texts += [_text_of(turn) for turn in inline] if merges_system else []
        if any(texts):
            yield Turn(role="system", content="".join(texts))
        for turn in self.messages:
            if turn.role != "system":
                yield from _converted(turn, media)
            elif not merges_system and (text := _text_of(turn)):
                yield Turn(role="system", content=text)

    def _tools(self) -> Tools | None:
        """Return the tools at the end of the conversation."""
        blocks = [
            block
            for turn in self.messages
            if not isinstance(turn.content, str)
            for block in turn.content
            if block.type in _CHANGES
        ]
        if not blocks:
            return None if self.tools is None else [tool.for_template() for tool in self.tools]
        tools = {tool.name: tool for tool in self.tools or ()}
        removed: set[str] = set()
        for block in blocks:
            name = _change(block, tools)
            if block.type == "tool_removal":
                removed.add(name)
            else:
                removed.discard(name)
        return [tool.for_template() for name, tool in tools.items() if name not in removed]


class MessagesPrompt(CountPrompt, kw_only=True):
    """Request of the Messages API whose prompt is requested."""

    max_tokens: schema.MaxTokens

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens


def _change(block: Block, tools: dict[str, AnthropicTool]) -> str:
    """Add a block's tool, or load it; return its name."""
    if block.tool is None:
        raise InvalidRequest(f"a block of type {block.type} needs a tool", param="messages")
    if block.tool.definition is not None:
        tools[block.tool.definition.name] = block.tool.definition
        return block.tool.definition.name
    name = block.tool.name
    if name not in tools:
        raise InvalidRequest(f"{block.type} names {name!r}, which tools lacks", param="messages")
    if block.type == "tool_addition":
        tools[name] = structs.replace(tools[name], defer_loading=None)
    return name


def _texts(blocks: Sequence[Block]) -> list[str]:
    """Return the texts of blocks of the system."""
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _text_of(turn: AnthropicTurn) -> str:
    """Return the text of a system message."""
    if not isinstance(turn.content, str):
        return "".join(_texts(turn.content))
    return "" if turn.content.startswith(BILLING_HEADER) else turn.content


def _converted(turn: AnthropicTurn, media: Mapping[str, RawMedia]) -> Iterator[Turn]:
    """Yield a message after the results of tools in it, which become messages of their own."""
    if isinstance(turn.content, str):
        yield Turn(role=turn.role, content=turn.content)
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in turn.content:
        if block.type == "text" and block.text:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image" and block.source is not None:
            parts.append(_image(block.source, media))
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            calls.append(_call(block))
        elif block.type == "tool_result" and turn.role == "user":
            yield from _result(block, media)
        elif block.type == "tool_result":
            raise UnsupportedParameter(
                "the result of a tool stands in a message of the user", param="messages"
            )
    if turn.role == "assistant" or parts:
        yield Turn(
            role=turn.role,
            content=parts or None,
            tool_calls=calls or None,
            reasoning="".join(thoughts) if thoughts else None,
        )


def _call(block: Block) -> dict[str, Any]:
    function = {"arguments": json.dumps(block.input or {}), "name": block.name or ""}
    return {"id": block.id or "call", "function": function, "type": "function"}


def _result(block: Block, media: Mapping[str, RawMedia]) -> Iterator[Turn]:
    """Yield the text of a result, its images as the user's, and the tools that it names."""
    inner = block.content if isinstance(block.content, list) else []
    text = block.content if isinstance(block.content, str) else "\n".join(_inner_texts(inner))
    called = block.tool_use_id or ""
    yield Turn(role="tool", tool_call_id=called, content=text)
    images = [_image(each.source or _Source(), media) for each in inner if each.type == "image"]
    if images:
        yield Turn(role="user", content=images)
    if any(each.type == "tool_reference" for each in inner):
        raise UnsupportedParameter("references to tools are not supported", param="messages")


def _inner_texts(inner: Sequence[_Inner]) -> list[str]:
    return [each.text for each in inner if each.type == "text"]


def _image(source: _Source, media: Mapping[str, RawMedia]) -> dict[str, Any]:
    if source.type == "url":
        url = source.url
    elif source.data in media:
        url = source.data
    else:  # too short to be cut out of the body
        url = f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}
