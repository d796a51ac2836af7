"""Tools of Anthropic Messages."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct, UnsetType, structs

from afferent.builtin.apis import schema
from afferent.builtin.apis.tools import Function, ToolChoice, read_tool, with_tools
from afferent.builtin.pipeline.request import GenerateRequest
from afferent.errors import InvalidRequest, UnsupportedParameter


class AnthropicTool(Struct, kw_only=True):
    """Tool of the Messages API."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    def as_function(self) -> Function:
        """Return the function of the tool."""
        return Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
            defer_loading=self.defer_loading,
        )

    def for_template(self) -> dict[str, Any]:
        """Return the tool with the keys that vLLM hands to a chat template."""
        parameters = {**self.input_schema, "type": self.input_schema.get("type", "object")}
        return structs.replace(self.as_function(), parameters=parameters).as_tool()


_OWN: Final = (None, "custom")
_tools_decoder = msgspec.json.Decoder(list[dict[str, Any]] | None)


def add_tools(
    generate: GenerateRequest, tools: Raw | UnsetType, tool_choice: Any
) -> GenerateRequest:
    """Add the tools of a request.

    Raises:
        InvalidRequest: A tool, or the choice, is invalid.
        UnsupportedParameter: A tool is one that Anthropic's own servers run.
    """
    choice = _choice(tool_choice)
    if choice.mode == "none":
        return generate
    given = schema.read_part(_tools_decoder, tools, "tools") or ()
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    is_parallel = not (
        isinstance(tool_choice, dict) and tool_choice.get("disable_parallel_tool_use")
    )
    return with_tools(generate, functions, choice, is_parallel=is_parallel)


def _choice(given: Any) -> ToolChoice:
    match given:
        case None:
            return ToolChoice()
        case {"type": "auto" | "none" as mode}:
            return ToolChoice(mode)
        case {"type": "any"}:
            return ToolChoice("required")
        case {"type": "tool", "name": str(name)}:
            return ToolChoice("required", [name])
    raise InvalidRequest(
        "the type of tool_choice is auto, any, none, or tool with a name", param="tool_choice"
    )


def _function(given: dict[str, Any], where: str) -> Function:
    if (kind := given.get("type")) not in _OWN:
        raise UnsupportedParameter(
            f"{where}: tools of type {str(kind)[:64]!r} are not supported, only the client's own",
            param="tools",
        )
    return read_tool(given, AnthropicTool, where).as_function()
