"""Calls of tools in a format: which answers the grammar takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from tokenizers import Tokenizer

from afferent.builtin.engine.asked_form import Form, form_of
from afferent.builtin.engine.form.grammar import compile_form, tokenizer_of
from afferent.builtin.engine.model.form_guide import FormGuide
from afferent.errors import InvalidForm
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Sampling, ToolForm, ToolFunction

SHAPES = BUILT_IN_MODELS / "shapes"
GUIDE_TOKENIZER = tokenizer_of(SHAPES, eos_token_ids=[2])
TOKENIZER = Tokenizer.from_file(str(SHAPES / "tokenizer.json"))
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
RED = '{"name":"report","arguments":{"colour":"red"}}'
LOOK = '{"name":"look","arguments":{}}'


def function(name: str, schema: Any, *, is_strict: bool = False) -> ToolFunction:
    return ToolFunction(name, Raw(json.dumps(schema).encode()), is_strict)


def form(*functions: ToolFunction, answer: dict[str, Any] | None = None, **fields: Any) -> Form:
    tools = ToolForm(
        functions=list(functions) or [function("report", COLOUR), function("look", EMPTY)],
        **{"begin": "<tool_call>", "end": "</tool_call>", "is_special": True} | fields,
    )
    asked = form_of(
        Sampling(max_tokens=9, tools=msgspec.json.encode(tools).decode(), **(answer or {}))
    )
    assert asked is not None
    return asked


def takes(asked: Form, text: str) -> bool:
    """Return whether the text is a whole answer, token by token as the model writes it."""
    matcher = compile_form(GUIDE_TOKENIZER, asked)
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        mask = matcher.compute_bitmask()
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.consume_token(token)
    return bool(matcher.is_accepting())


def call(*calls: str) -> str:
    return "".join(f"<tool_call>{each}</tool_call>" for each in calls)


@pytest.mark.parametrize(
    ("text", "auto", "required", "alone"),
    [
        ("", True, False, True),
        ("a red circle", True, False, True),
        (call(RED), True, True, True),
        (call(RED, LOOK, RED), True, True, False),
        (f"I look. {call(LOOK)}", True, False, True),
        (f"{call(LOOK)} I looked.", False, False, False),
        (RED, True, False, True),
        (call('{"name":"report","arguments":{"colour":"green"}}'), False, False, False),
        (call('{"name":"report","arguments":{}}'), False, False, False),
        (call('{"name": "look", "arguments": {}}'), False, False, False),
        (call('{"name":"other","arguments":{}}'), False, False, False),
        (call('{"name":"look","arguments":{"a":1}}'), False, False, False),
        ("<tool_call>", False, False, False),
        ("<|im_start|>", False, False, False),
    ],
)
def test_what_may_be_said(text: str, auto: bool, required: bool, alone: bool) -> None:
    assert takes(form(), text) is auto
    assert takes(form(must_call=True), text) is required
    assert takes(form(is_parallel=False), text) is alone


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ({"json_schema": json.dumps(COLOUR)}, '{"colour":"blue"}', "blue"),
        ({"regex": "(a|b)/[0-9]{2}"}, "a/12", "a/1"),
        ({"choice": ("yes", "no/never")}, "no/never", "no"),
    ],
)
def test_calls_beside_another_format(answer: dict[str, Any], right: str, wrong: str) -> None:
    asked = form(answer=answer)
    assert takes(asked, right)
    assert not takes(asked, wrong)
    assert takes(asked, call(RED))
    assert not takes(asked, right + call(RED))
    assert asked.key != form().key


@pytest.mark.parametrize(
    ("answer", "fields", "text", "is_optional"),
    [
        ({"regex": "a+"}, {}, "", True),
        ({"regex": "a+"}, {}, "a", False),
        (None, {}, "", False),
        ({"regex": "a+"}, {"must_call": True}, "", False),
        ({"regex": "a+"}, {"is_special": False}, "", False),
    ],
)
def test_call_beside_a_format_is_optional_at_the_beginning_only(
    answer: dict[str, Any] | None, fields: dict[str, Any], text: str, is_optional: bool
) -> None:
    guide = FormGuide(GUIDE_TOKENIZER)
    mark, answered = TOKENIZER.token_to_id("<tool_call>"), GUIDE_TOKENIZER.tokenize_str(text)
    guide.begin("r", form(answer=answer, **fields), nbytes=0, answered=answered)
    guide.masks(["r"])
    assert guide.optional("r") == (mark if is_optional else None)
    guide.advance([("r", mark)])
    guide.masks(["r"])
    assert guide.optional("r") is None
    assert guide.optional("unknown") is None


def test_marks_that_are_no_special_tokens() -> None:
    asked = form(begin="[call]\n", end="\n[/call]", is_special=False)
    assert takes(asked, f"[call]\n{RED}\n[/call]")
    assert takes(asked, "I look. [cal")
    assert not takes(asked, "I look. [call]\nwell")


def test_names_are_quoted() -> None:
    name = 'a"b\\c é\n'
    asked = form(function(name, EMPTY))
    assert takes(
        asked,
        call(
            json.dumps({"name": name, "arguments": {}}, ensure_ascii=False, separators=(",", ":"))
        ),
    )


def test_keywords_that_can_not_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert takes(form(function("f", schema)), call('{"name":"f","arguments":{"a":[]}}'))
    with pytest.raises(InvalidForm, match=r"the tools can't be followed: .*uniqueItems") as caught:
        compile_form(GUIDE_TOKENIZER, form(function("f", schema, is_strict=True)))
    assert "item_separator" not in caught.value.message


@pytest.mark.parametrize("schema", ["x", 3, [], None])
def test_schemas_that_are_none(schema: Any) -> None:
    with pytest.raises(InvalidForm, match="the tools can't be followed: it must be an object"):
        compile_form(GUIDE_TOKENIZER, form(function("f", schema)))
