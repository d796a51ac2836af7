"""Tools of chat completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from afferent.builtin.apis import schema
from afferent.builtin.apis.chat.schema import ChatRequest
from afferent.builtin.apis.tools import Function, read_choice, with_tools
from afferent.builtin.pipeline.request import GenerateRequest


class ChatTool(Struct, kw_only=True):
    """Tool of a chat completion."""

    function: Function
    type: Literal["function"] = "function"
    defer_loading: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool with the keys that vLLM hands to a chat template."""
        if self.defer_loading is None:
            return self.function.as_tool()
        if self.function.defer_loading is None:
            self.function.defer_loading = self.defer_loading
        return self.function.as_tool(defer_loading=self.defer_loading)


_tools_decoder = msgspec.json.Decoder(list[ChatTool] | None)
_functions_decoder = msgspec.json.Decoder(list[Function] | None)


def add_tools(generate: GenerateRequest, chat: ChatRequest) -> GenerateRequest:
    """Add the tools of a chat completion.

    Raises:
        InvalidRequest: A tool, or the choice, is invalid.
    """
    choice = read_choice(chat.tool_choice, _name)
    if chat.tool_choice is None and chat.function_call is not None:
        old = chat.function_call
        choice = read_choice({"function": old} if isinstance(old, dict) else old, _name)
    if choice.mode == "none":
        return generate
    tools = schema.read_part(_tools_decoder, chat.tools, "tools") or ()
    old_functions = schema.read_part(_functions_decoder, chat.functions, "functions") or ()
    functions = [*(tool.function for tool in tools), *old_functions]
    return with_tools(
        generate, functions, choice, is_parallel=chat.parallel_tool_calls is not False
    )


def _name(given: Any) -> str | None:
    match given:
        case {"function": {"name": str(name)}}:
            return name
    return None
