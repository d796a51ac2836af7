"""Chat template of a model: messages to the text format that the model was trained with."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
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
        template = _template_of(folder)
        try:
            self._template = _compile(template)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of {folder} is broken at line {error.lineno}: {error.message}"
            ) from error
        # A role that the model was not trained with would be an unknown word to it.
        self.has_tool_role = re.search(r"""["']tool["']""", template) is not None
        self.is_constant = _CHANGES.search(template) is None
        """Whether the same messages always give the same text."""
        self._names = special_names(folder)

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
            continues_last: Whether the text ends with that of the last message, whose last part is
                text.

        Raises:
            InvalidRequest: The template refuses the messages.
        """
        if not continues_last:
            return self._render(messages, variables, begins_answer=begins_answer)
        *before, last = messages
        *others, text = last["content"]
        # The final space shows whether the template strips text.
        opened = {"type": "text", "text": f"{text['text']}{_OPEN_END} "}
        open_messages = [*before, {**last, "content": [*others, opened]}]
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
        known = {**variables, **self._names}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=begins_answer, **known
            )
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


def _template_of(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(template, str):
            return template
    raise ConfigError(f"{folder} has no chat template")


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))
