"""Tools of a request, for all APIs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct, structs

from afferent.builtin.apis.forms import check_is_closed
from afferent.builtin.pipeline.request import GenerateRequest, ToolUse
from afferent.errors import InvalidForm, InvalidRequest
from afferent.types import MAX_TOOLS_NBYTES, ToolFunction

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class Function(Struct, kw_only=True):
    """Function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    def as_tool(self, **extra: Any) -> dict[str, Any]:
        """Return the tool with this function, for a chat template.

        Args:
            extra: Further keys of the tool.
        """
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        if self.strict is not None:
            function["strict"] = self.strict
        if self.defer_loading is not None:
            function["defer_loading"] = self.defer_loading
        return {"type": "function", "function": function, **extra}


def read_tool(given: dict[str, Any], kind: type[T], where: str) -> T:
    """Convert a tool to a type of an API.

    Args:
        where: Name of the tool in messages.

    Raises:
        InvalidRequest: It is not of this type.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param="tools") from error


Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Choice among the tools of a request.

    Attributes:
        mode: Whether the answer calls none, may call some, or must call one.
        names: The tools that it may call; ``None``: all.
    """

    mode: Mode = "auto"
    names: Collection[str] | None = None


def read_choice(given: Any, name_of: Callable[[Any], str | None]) -> ToolChoice:
    """Translate ``tool_choice`` of OpenAI's APIs.

    Args:
        name_of: Returns the name in an object that stands for a tool, in the format of the API.

    Raises:
        InvalidRequest: It is unknown.
    """
    match given:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required" as mode:
            return ToolChoice(mode)
        case {"type": "none" | "auto" | "required" as mode}:
            return ToolChoice(mode)
        case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}} | {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": list(tools),
        }:
            choice = ToolChoice(mode, [name_of(tool) or "" for tool in tools])
        case _:
            choice = ToolChoice("required", [name_of(given) or ""])
    if "" in (choice.names or ()):
        raise InvalidRequest(
            "tool_choice is none, auto, required, allowed_tools, or names one of the tools",
            param="tool_choice",
        )
    return choice


def with_tools(
    generate: GenerateRequest,
    functions: Sequence[Function],
    choice: ToolChoice,
    *,
    is_parallel: bool,
) -> GenerateRequest:
    """Add tools to a request that has its messages and the options of the chat template.

    Raises:
        InvalidRequest: The choice names a tool that is missing, or needs tools and there are none.
        InvalidForm: The tools are too large.
    """
    if choice.mode == "none":
        return generate
    if not functions:
        if choice != ToolChoice():
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return generate
    known = {function.name: function for function in functions}
    callable_names = known.keys() if choice.names is None else choice.names
    if not callable_names or (missing := [n for n in callable_names if n not in known]):
        wrong = "no tool" if not callable_names else f"{missing[0]!r}, which tools lacks"
        raise InvalidRequest(f"tool_choice names {wrong}", param="tool_choice")
    use = ToolUse(
        functions=tuple(_callable(known[name]) for name in dict.fromkeys(callable_names)),
        must_call=choice.mode == "required",
        is_parallel=is_parallel,
    )
    shown = [_shown(function) for function in known.values()]
    nbytes = len(_encode(shown))
    if nbytes > MAX_TOOLS_NBYTES // 2:
        raise InvalidForm(
            f"tools has {nbytes} bytes, and may have {MAX_TOOLS_NBYTES // 2}", param="tools"
        )
    options = generate.template
    return structs.replace(
        generate,
        tool_use=use,
        form_param=generate.form_param or "tools",
        template=replace(
            options,
            variables={"tools": shown, **options.variables},
            num_characters=options.num_characters + nbytes,
        ),
    )


def _shown(function: Function) -> dict[str, Any]:
    """Return a tool for the chat template."""
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in fields.items() if value is not None},
    }


def _callable(function: Function) -> ToolFunction:
    """Return a tool for the engine.

    Arguments that the schema does not declare are excluded, unless it allows them.
    """
    parameters = {"type": "object", **(function.parameters or {"properties": {}})}
    if function.strict and function.parameters is not None:
        check_is_closed(parameters, "tools")
    if "properties" in parameters:
        parameters.setdefault("additionalProperties", False)
    return ToolFunction(function.name, Raw(_encode(parameters)), bool(function.strict))


def call_id(request_id: str, index: int, number: int, prefix: str = "call_") -> str:
    """Return the id of a call in an answer."""
    _, _, unique = request_id.rpartition("_" if "_" in request_id else "-")
    return f"{prefix}{unique}_{index}_{number}"
