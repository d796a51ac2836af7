"""Grammar of a response format for `llguidance`, and the limits of its evaluation.

The process that tests a format and the worker that follows it use the same code, so that a format
that passes the test works in the worker too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from afferent.builtin.engine.asked_form import Form
from afferent.builtin.engine.form.sizes import excess_of_choice, excess_of_schema
from afferent.errors import ConfigError, InvalidForm
from afferent.types import ToolForm

_JSON_OPTIONS: Final[dict[str, Any]] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
"""All options, so that a schema can't set its own: an answer follows its schema, or there is
none. JSON is compact: whitespace costs tokens, and a model may write it forever.
"""
_OWN_OPTIONS: Final = "x-guidance"
_LONGEST_ERROR = 500
_tool_form_decoder = msgspec.json.Decoder(ToolForm)
_encode = msgspec.json.Encoder().encode

# They are counts, so that a format is refused on every machine or on none. The limits of a step
# bound the time of a token mask, for any format; the others bound the time to compile a format,
# and its memory.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def tokenizer_of(folder: Path, *, eos_token_ids: Sequence[int], vocab_size: int = 0) -> LLTokenizer:
    """Return the tokenizer of the model in this folder.

    Args:
        folder: A folder with a ``tokenizer.json``.
        eos_token_ids: Tokens that end an answer.
        vocab_size: Number of tokens that the model chooses from; 0: as many as the tokenizer has.

    Raises:
        ConfigError: This tokenizer does not support response formats.
        OSError: It can't be read now.
    """
    if not eos_token_ids:
        raise ConfigError("the model has no token that ends an answer")
    try:
        text, ends = (folder / "tokenizer.json").read_text(), list(eos_token_ids)
        known = LLTokenizer(text, eos_token=ends)
        if vocab_size <= known.vocab_size:
            return known
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError("the model's tokenizer.json can't be followed") from error


def compile_form(tokenizer: LLTokenizer, form: Form) -> LLMatcher:
    """Return a matcher at the beginning of an answer of this format.

    It may take any time and memory: a format is tested first in a sandbox.

    Raises:
        InvalidForm: No answer is possible, or the format uses an unknown construct; the error names
            it.
    """
    matcher = LLMatcher(tokenizer, _grammar(form), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise InvalidForm(_told(form, matcher.get_error()))
    return matcher


def too_much(form: Form, what: Literal["time", "memory"] | None = None) -> InvalidForm:
    """Return the error of a format that takes more than its limit.

    Args:
        what: The limited resource, if it is known.
    """
    return InvalidForm(
        _told(form, f"it takes too much {what or 'time or memory'}; make it simpler")
    )


def no_answer(form: Form) -> InvalidForm:
    """Return the error of a format that no answer can have."""
    return InvalidForm(_told(form, "no answer can have this form"))


def _grammar(form: Form) -> str:
    match form.kind:
        case "json_schema":
            text, options = _encode(_schema(form, form.text)).decode(), cast(Any, _JSON_OPTIONS)
            return LLMatcher.grammar_from_json_schema(text, overrides=options)
        case "regex" | "choice":
            return LLMatcher.grammar_from_regex(_expression(form))
        case "tools":
            return f"%llguidance {{}}\n{_of_tools(form)}\n"


def _expression(form: Form) -> str:
    if form.kind == "regex":
        return form.text
    texts = msgspec.json.decode(form.text, type=list[str])
    _check(form, excess_of_choice(texts))
    return "|".join(f"(?:{_quoted(text)})" for text in texts)


def optional_call(form: Form) -> str:
    """Return the special token that begins a call, where an answer with a format may be given
    instead; otherwise an empty text.
    """
    if form.kind != "tools" or form.answer is None:
        return ""
    tools = _tool_form_decoder.decode(form.text)
    return tools.begin if tools.is_special and not tools.must_call else ""


def _of_tools(form: Form) -> str:
    """Return the rules for calls, and for a text before them or another answer instead."""
    try:
        tools = _tool_form_decoder.decode(form.text)
    except msgspec.DecodeError as error:
        raise InvalidForm(_told(form, "it is no form of tools")) from error
    begin, end = tools.begin, tools.end
    rules = [
        f"calls: {'call+' if tools.is_parallel else 'call'}",
        f"call: {_written(begin, tools)} body {_written(end, tools)}",
        "body: " + " | ".join(f"body_{index}" for index in range(len(tools.functions))),
    ]
    for index, function in enumerate(tools.functions):
        head = f'{{"name":{_text(function.name)},"arguments":'
        text = bytes(function.parameters).decode()
        arguments = _json(form, text, lenient=not function.is_strict)
        rules += [
            f'body_{index}: {_text(head)} arguments_{index} "}}"',
            f"arguments_{index}: {arguments}",
        ]
    if tools.must_call:
        start = "calls"
    elif form.answer is not None:
        start = f"answer | calls\nanswer: {_inner(form.answer)}"
    else:
        mark = _pattern(_quoted(begin))
        start = "TEXT calls?"
        rules.append(rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{mark}(.|\n)*/")
    return "\n".join((f"start: {start}", *rules))


def _written(mark: str, tools: ToolForm) -> str:
    """Return a mark around a call: a special token, or a text."""
    return mark if tools.is_special else _text(mark)


def _text(text: str) -> str:
    return _encode(text).decode()


def _inner(answer: Form) -> str:
    """Return the right side of the rule for an answer without calls."""
    if answer.kind == "json_schema":
        return _json(answer, answer.text, lenient=False)
    return f"/{_pattern(_expression(answer))}/"


def _pattern(expression: str) -> str:
    """Return a regular expression for a place between slashes."""
    on_a_line = expression.replace("\n", r"\n")
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", on_a_line)


def _json(form: Form, text: str, *, lenient: bool) -> str:
    options = _JSON_OPTIONS | {"lenient": lenient}
    return f"%json {_encode(_schema(form, text) | {_OWN_OPTIONS: options}).decode()}"


def _schema(form: Form, text: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(text)
    except RecursionError as error:
        raise InvalidForm(_told(form, "it is nested too deep")) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidForm(_told(form, "it is not valid JSON")) from error
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidForm(_told(form, "it must be an object"))
    schema.pop(_OWN_OPTIONS, None)
    _check(form, excess_of_schema(schema))
    return schema


def _check(form: Form, excess: str | None) -> None:
    if excess is not None:
        raise InvalidForm(_told(form, excess))


def _quoted(text: str) -> str:
    """Return a regular expression for this text alone."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


def _told(form: Form, why: str) -> str:
    """Return the message for the client: short, and without positions in our own grammar."""
    what = {
        "json_schema": "the JSON schema",
        "regex": "the regex",
        "choice": "the choice",
        "tools": "the tools",
    }
    lines = [line.strip() for line in why.strip().splitlines()]
    if form.kind != "json_schema":
        lines = [line for line in lines if line.startswith("error:")] or lines[:1]
    words = " ".join(line.removeprefix("error: ") for line in lines if line)
    words = words.partition(" Enable '")[0]  # options that are not the client's
    return f"{what[form.kind]} can't be followed: {words[:_LONGEST_ERROR]}"
