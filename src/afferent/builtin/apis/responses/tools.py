"""Tools of OpenAI Responses."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from afferent.builtin.apis import schema
from afferent.builtin.apis.tools import Function, ToolChoice
from afferent.errors import InvalidRequest, UnsupportedParameter

_WHICH: Final = "tool_choice is none, auto, required, allowed_tools, or names one of the tools"
_tools_decoder = msgspec.json.Decoder(
    Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_PARTS)] | None
)


def read_choice(given: Any) -> ToolChoice:
    """Translate ``tool_choice``.

    Raises:
        InvalidRequest: It is unknown.
    """
    match given:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(given)
        case {"type": "none" | "auto" | "required" as mode}:
            return ToolChoice(mode)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return ToolChoice(mode, [_name(tool) for tool in tools])
        case dict():
            return ToolChoice("required", [_name(given)])
    raise InvalidRequest(_WHICH, param="tool_choice")


def read_tools(given: msgspec.Raw | msgspec.UnsetType) -> list[Function]:
    """Translate ``tools``.

    Raises:
        InvalidRequest: A function is invalid.
        UnsupportedParameter: A tool is one that OpenAI's own servers run.
    """
    tools = schema.read_part(_tools_decoder, given, "tools") or ()
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _name(given: Any) -> str:
    match given:
        case {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequest(_WHICH, param="tool_choice")


def _function(given: dict[str, Any], where: str) -> Function:
    if (kind := given.get("type")) != "function":
        raise UnsupportedParameter(
            f"{where}: tools of type {str(kind)[:64]!r} are not supported, only functions",
            param="tools",
        )
    try:
        return msgspec.convert(given, Function)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param="tools") from error
