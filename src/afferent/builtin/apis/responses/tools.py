"""Tools of OpenAI Responses."""

from __future__ import annotations

from typing import Any

import msgspec

from afferent.builtin.apis import schema
from afferent.builtin.apis.tools import Function, read_tool
from afferent.errors import UnsupportedParameter

_tools_decoder = msgspec.json.Decoder(list[dict[str, Any]] | None)


def name_of(given: Any) -> str | None:
    """Return the name of the tool that ``tool_choice`` has, or its list of allowed ones."""
    match given:
        case {"type": "function", "name": str(name)}:
            return name
    return None


def read_tools(given: msgspec.Raw | msgspec.UnsetType) -> list[Function]:
    """Translate ``tools``.

    Raises:
        InvalidRequest: A function is invalid.
        UnsupportedParameter: A tool is one that OpenAI's own servers run.
    """
    tools = schema.read_part(_tools_decoder, given, "tools") or ()
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _function(given: dict[str, Any], where: str) -> Function:
    if (kind := given.get("type")) != "function":
        raise UnsupportedParameter(
            f"{where}: tools of type {str(kind)[:64]!r} are not supported, only functions",
            param="tools",
        )
    return read_tool(given, Function, where)
