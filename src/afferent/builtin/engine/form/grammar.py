"""Grammar of a response format for `llguidance`, and the limits of its evaluation.

The process that tests a format and the worker that follows it use the same code, so that a format
that passes the test works in the worker too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from afferent.builtin.engine.asked_form import Form
from afferent.builtin.engine.form.sizes import excess_of_choice, excess_of_schema
from afferent.errors import ConfigError, InvalidForm

_WHITESPACE: Final = r" |\n {0,16}"
"""Whitespace between the parts of JSON: a space, or a new line with indentation. Without a limit, a
model that was not trained to write JSON may write whitespace forever.
"""
_JSON_OPTIONS: Final[dict[str, Any]] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
"""All options, so that a schema can't set its own: an answer follows its schema, or there is
none.
"""
_OWN_OPTIONS: Final = "x-guidance"
_LONGEST_ERROR = 500

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
            return _of_schema(form)
        case "regex":
            return LLMatcher.grammar_from_regex(form.text)
        case "choice":
            texts = msgspec.json.decode(form.text, type=list[str])
            _check(form, excess_of_choice(texts))
            return LLMatcher.grammar_from_regex("|".join(f"(?:{_quoted(text)})" for text in texts))


def _of_schema(form: Form) -> str:
    try:
        schema = msgspec.json.decode(form.text)
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
    text, options = msgspec.json.encode(schema).decode(), cast(Any, _JSON_OPTIONS)
    return LLMatcher.grammar_from_json_schema(text, overrides=options)


def _check(form: Form, excess: str | None) -> None:
    if excess is not None:
        raise InvalidForm(_told(form, excess))


def _quoted(text: str) -> str:
    """Return a regular expression for this text alone."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


def _told(form: Form, why: str) -> str:
    """Return the message for the client: short, and without positions in our own grammar."""
    what = {"json_schema": "the JSON schema", "regex": "the regex", "choice": "the choice"}
    lines = [line.strip() for line in why.strip().splitlines()]
    if form.kind != "json_schema":
        lines = [line for line in lines if line.startswith("error:")] or lines[:1]
    words = " ".join(line.removeprefix("error: ") for line in lines if line)
    words = words.partition(" Enable '")[0]  # options that are not the client's
    return f"{what[form.kind]} can't be followed: {words[:_LONGEST_ERROR]}"
