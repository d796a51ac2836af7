"""Chat template of a model: messages to the text format that the model was trained with."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from afferent.errors import ConfigError, InvalidRequest, Param
from afferent.media.families.family import read_json
from afferent.media.families.tokens import SPECIAL_NAMES, special_names

STAND_IN: Final = "\ue000"
"""Delimiter of the numbers that replace quoted texts until the template has run."""
_OPEN_END: Final = f"{STAND_IN}open{STAND_IN}"
_OWN_NAMES: Final = ("messages", "add_generation_prompt", "continue_final_message")
RESERVED_NAMES: Final = frozenset((*_OWN_NAMES, *SPECIAL_NAMES))
"""Variables that clients can't set."""
_CHANGES: Final = re.compile(r"strftime_now|random|lipsum")
_TEMPLATE_FAILURES: Final = (
    jinja2.TemplateError,
    # Errors of a template for variables of an unexpected type.
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)


class ChatTemplate:
    """Chat template of one model's folder."""

    def __init__(self, folder: Path) -> None:
        """Read and compile the template.

        Raises:
            ConfigError: There is none, or it is invalid.
        """
        template, for_tools = (_template_of(folder, has_tools=each) for each in (False, True))
        try:
            self._template = _compile(template)
            self._with_tools = self._template if for_tools == template else _compile(for_tools)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of {folder} is broken at line {error.lineno}: {error.message}"
            ) from error
        # A role that the model was not trained with would be an unknown word to it.
        self.has_tool_role = _has_role(template, "tool")
        self.has_developer_role = _has_role(template, "developer")
        self.has_calls = "tool_calls" in for_tools
        """Whether the assistant's messages may have tool calls."""
        is_json = "<tool_call>" in for_tools and "<function=" not in for_tools
        self.call_marks = ("<tool_call>", "</tool_call>") if is_json else None
        """Texts around a call, which is JSON; ``None``: calls have another format, or none."""
        self.calls_have_lines = re.search(r"<tool_call>(\n|\\n)", for_tools) is not None
        self.is_constant = _CHANGES.search(template) is None
        """Whether the same messages always give the same text."""
        self._names = special_names(folder)
        self._texts = template, for_tools

    @cached_property
    def merges_system(self) -> bool:
        """Whether system messages are merged into the first one, since it is refused elsewhere.

        vLLM decides so for its Messages API, by a trial without the functions of its renderer.
        """
        return any(map(_refuses_later_system, self._texts))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        begins_answer: bool,
        continues_last: bool,
    ) -> str:
        """Render messages.

        Args:
            variables: Further variables of the template.
            begins_answer: Whether the assistant's turn begins at the end.
            continues_last: Whether the prompt ends with the last text of the last message.

        Raises:
            InvalidRequest: The template refuses the messages, or the last one has no text.
        """
        if not continues_last:
            return self._render(messages, variables, begins_answer=begins_answer)
        *before, last = messages
        open_messages = [*before, {**last, "content": _opened(last["content"])}]
        rendered = self._render(open_messages, variables, begins_answer=False)
        said, found, rest = rendered.rpartition(_OPEN_END)
        if not found:
            raise InvalidRequest(
                "the model's chat template does not let a message be gone on with",
                param=Param.MESSAGES,
            )
        return said if rest.startswith(" ") else said.rstrip()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        begins_answer: bool,
    ) -> str:
        known = {"tools": None, "documents": None, **variables, **self._names}
        template = self._template if known["tools"] is None else self._with_tools
        try:
            return template.render(messages=messages, add_generation_prompt=begins_answer, **known)
        except _TemplateRefusal as error:
            raise InvalidRequest(
                f"the model's chat template: {error}", param=Param.MESSAGES
            ) from error
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                "the model's chat template can't express these messages", param=Param.MESSAGES
            ) from error


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by a template that calls ``raise_exception``."""


def _opened(content: str | Sequence[Mapping[str, Any]]) -> Any:
    """Return a message's content with a mark at the end of its last text.

    The space after the mark shows whether the template strips text.
    """
    if isinstance(content, str):
        return f"{content}{_OPEN_END} "
    parts = list(content)
    for index, part in reversed(list(enumerate(parts))):
        if "text" in part:
            parts[index] = {**part, "text": f"{part['text']}{_OPEN_END} "}
            return parts
    raise InvalidRequest(
        "there is nothing to go on with: the last message has no text", param=Param.MESSAGES
    )


def _has_role(template: str, role: str) -> bool:
    return re.search(f"""["']{role}["']""", template) is not None


def _refuses_later_system(template: str) -> bool:
    roles = ("system", "user", "system", "user")
    messages = [{"role": role, "content": "t"} for role in roles]
    try:
        _environment().from_string(template).render(messages=messages, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    except _TEMPLATE_FAILURES:
        return False
    return False


def _template_of(folder: Path, *, has_tools: bool = False) -> str:
    """Return the template of a folder.

    Args:
        has_tools: Whether the conversation has tools. As in vLLM, the tokenizer's template then
            precedes the processor's, and one with the name ``tool_use`` the other ones.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from error
    names = ("chat_template.json", "tokenizer_config.json")
    for name in reversed(names) if has_tools else names:
        path = folder / name
        template = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(template, list):
            named = {each.get("name"): each.get("template") for each in template}
            template = (named.get("tool_use") if has_tools else None) or named.get("default")
        if isinstance(template, str):
            return template
    raise ConfigError(f"{folder} has no chat template")


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )


def _compile(template: str) -> jinja2.Template:
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
