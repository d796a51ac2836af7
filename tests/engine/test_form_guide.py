"""Answers in a response format: the allowed tokens, from a guide alone and in the runner."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator

from afferent.builtin.engine.asked_form import Form
from afferent.builtin.engine.form.grammar import tokenizer_of
from afferent.builtin.engine.model import form_guide
from afferent.builtin.engine.model.form_guide import FormGuide, TokenMask
from afferent.builtin.engine.model.sampling import Wanted, choose
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.schedule.step import Chunk
from afferent.types import Sampling
from tests.engine.runner_model import MODELS, Model, Prepared, prepare_all

EOS = 2
TOKENIZER = tokenizer_of(BUILT_IN_MODELS / "shapes", eos_token_ids=[EOS], vocab_size=512)


def allowed(mask: TokenMask | None) -> set[int]:
    assert mask is not None
    return {int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))}


def texts(mask: TokenMask | None) -> set[str]:
    return {TOKENIZER.decode_str([token]) for token in allowed(mask)}


def follow(guide: FormGuide, name: str, tokens: Sequence[int]) -> TokenMask | None:
    for token in tokens:
        guide.advance([(name, token)])
    (mask,), failed = guide.masks([name])
    assert not failed
    return mask


def ids(text: str) -> list[int]:
    return list(TOKENIZER.tokenize_str(text))


# The guide


def test_what_may_come_next() -> None:
    guide = FormGuide(TOKENIZER)
    guide.begin("a", Form("regex", "ab+"), nbytes=0, answered=[])
    guide.begin("b", Form("choice", '["yes","no"]'), nbytes=0, answered=[])
    (first, second, free), failed = guide.masks(["a", "b", "of no form"])
    assert (free, failed) == (None, {})
    assert all("ab".startswith(text) or text.startswith("ab") for text in texts(first))
    assert {text[0] for text in texts(second)} == {"y", "n"}
    assert EOS not in allowed(first) | allowed(second)
    assert EOS in allowed(follow(guide, "a", ids("ab")))
    assert allowed(follow(guide, "b", ids("no"))) == {EOS}
    guide.advance([("b", EOS), ("of no form", 7)])
    assert allowed(guide.masks(["b"])[0][0]) == {EOS}, "nothing follows the end"


SCHEMAS: dict[str, Any] = {
    "strings": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string", "minLength": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 2},
    "nested": {
        "type": "object",
        "properties": {
            "list": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"n": {"type": "number"}, "s": {"type": ["string", "null"]}},
                    "required": ["n"],
                },
            }
        },
        "required": ["list"],
    },
    "any object": {"type": "object"},
}


def random_answer(
    guide: FormGuide, form: Form, rng: np.random.Generator, max_tokens: int, *, begun: str = ""
) -> list[int]:
    """Return an answer of random tokens; it ends by itself only if it has to."""
    tokens = ids(begun)
    guide.begin("a", form, nbytes=0, answered=tokens, max_tokens=max_tokens)
    while len(tokens) < max_tokens:
        (mask,), failed = guide.masks(["a"])
        assert not failed
        likely = [token for token in allowed(mask) if token != EOS]
        if not likely:
            break
        tokens.append(int(rng.choice(likely)))
        guide.advance([("a", tokens[-1])])
    guide.drop("a")
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("max_tokens", [40, 70])
def test_json_is_closed_before_the_limit(
    name: str, max_tokens: int, rng: np.random.Generator
) -> None:
    """A model that does not end its strings answers with JSON, too."""
    guide, form = FormGuide(TOKENIZER), Form("json_schema", json.dumps(SCHEMAS[name]))
    for _ in range(10):
        tokens = random_answer(guide, form, rng, max_tokens)
        assert len(tokens) < max_tokens, "the token that ends it has room"
        value = json.loads(TOKENIZER.decode_bytes(tokens))
        Draft202012Validator(SCHEMAS[name]).validate(value)


def test_an_end_begins_no_earlier_than_it_has_to(rng: np.random.Generator) -> None:
    guide, form = FormGuide(TOKENIZER), Form("json_schema", json.dumps(SCHEMAS["strings"]))
    begun = '{"a":"red","b":"gre'
    free = form_guide.FormGuide(TOKENIZER)
    free.begin("a", form, nbytes=0, answered=ids(begun))
    may_come = allowed(free.masks(["a"])[0][0])
    num_tokens = len(ids(begun))
    for left in (60, 14, 9):
        guide.begin("a", form, nbytes=0, answered=ids(begun), max_tokens=num_tokens + left)
        found = allowed(guide.masks(["a"])[0][0])
        assert found <= may_come
        assert {*ids("e"), *ids('"')} <= found, "the word can be completed"
        assert (found == may_come) is (left == 60)
    guide.begin("a", form, nbytes=0, answered=ids(begun), max_tokens=num_tokens + 4)
    assert allowed(guide.masks(["a"])[0][0]) == set(ids('"'))


def test_answers_that_find_no_end_are_cut(rng: np.random.Generator) -> None:
    guide = FormGuide(TOKENIZER)
    assert len(random_answer(guide, Form("regex", "(ab){60}"), rng, 30)) == 30
    schema = Form("json_schema", json.dumps(SCHEMAS["strings"]))
    assert len(random_answer(guide, schema, rng, 3)) == 3


def test_an_answer_that_begins_again_goes_on() -> None:
    guide, text = FormGuide(TOKENIZER), ids("abb")
    form = Form("regex", "ab{2}c")
    guide.begin("a", form, nbytes=0, answered=[])
    before = allowed(follow(guide, "a", text))
    guide.drop("a")
    guide.begin("a", form, nbytes=0, answered=text)
    assert allowed(follow(guide, "a", [])) == before
    guide.drop("a")
    assert guide.masks(["a"]) == ([None], {})


def test_a_token_that_may_not_come_fails_its_answer_alone() -> None:
    guide = FormGuide(TOKENIZER)
    for name in "ab":
        guide.begin(name, Form("regex", "a*"), nbytes=0, answered=[])
    guide.advance([("a", ids("b")[0]), ("b", ids("a")[0])])
    (first, second), failed = guide.masks(["a", "b"])
    assert first is None
    assert failed.keys() == {"a"}
    assert failed["a"].code == "invalid_form"
    assert EOS in allowed(second)


def test_forms_that_were_never_tried_fail_too() -> None:
    guide = FormGuide(TOKENIZER)
    guide.begin("a", Form("regex", "("), nbytes=0, answered=[])
    _, failed = guide.masks(["a"])
    assert failed["a"].code == "invalid_form"


def test_one_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    go_on = threading.Event()
    compile_form = form_guide.compile_form

    def late(*given: Any) -> Any:
        go_on.wait(60)
        return compile_form(*given)

    monkeypatch.setattr(form_guide, "compile_form", late)
    monkeypatch.setattr(form_guide, "_TIMEOUT_S", 0.05)
    guide = FormGuide(TOKENIZER)
    guide.begin("a", Form("regex", "a"), nbytes=0, answered=[])
    _, failed = guide.masks(["a"])
    assert "too much time" in failed["a"].message
    go_on.set()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_form = form_guide.compile_form

    def counted(tokenizer: Any, form: Form) -> Any:
        compiled.append(form.text)
        return compile_form(tokenizer, form)

    monkeypatch.setattr(form_guide, "compile_form", counted)
    guide = FormGuide(TOKENIZER)

    def use(text: str, nbytes: int) -> None:
        guide.begin("a", Form("regex", text), nbytes=nbytes, answered=[])
        assert allowed(guide.masks(["a"])[0][0])
        guide.drop("a")

    for _ in range(2):
        use("a", 1)
    assert compiled == ["a"], "it is compiled once"
    use("b", form_guide._MAX_KNOWN_NBYTES)
    use("a", 1)
    assert compiled == ["a", "b", "a"], "what is large leaves no room for others"
    for number in range(form_guide._MAX_KNOWN):
        use(f"c{number}", 0)
    use("a", 1)
    assert compiled[-1] == "a", "the one that was asked for longest ago is gone"


# Choosing


def mask_of(*tokens: int, size: int = 32) -> TokenMask:
    bits = np.zeros(size, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little")


def test_only_what_may_come_is_chosen() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 2.0]] * 4)
    greedy, hot = Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=2.0, seed=1)
    wanted = [
        Wanted(greedy, 1, mask=mask_of(0, 2)),
        Wanted(greedy, 1),
        Wanted(hot, 1, mask=mask_of(0)),
        Wanted(greedy, 1, mask=mask_of(0, 3, 9)),  # an id beyond the model's vocabulary
    ]
    assert choose(logits, wanted) == [2, 1, 0, 3]
    assert logits[0].tolist() == [0.0, 9.0, 1.0, 2.0], "they are kept"
    padded = torch.tensor([[0.0] * 40 + [9.0]])
    assert choose(padded, [Wanted(greedy, 1, mask=mask_of(5))]) == [5]


# The runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return MODELS["qwen2"].make_and_load(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(model: Model) -> Prepared:
    return next(each for each in prepare_all(model) if not each.items)


NUM_TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}


def answer(
    model: Model, prepared: Prepared, *, again_every: int = 0, **parameters: Any
) -> tuple[str, bool]:
    """Return the text, and whether it has ended.

    Args:
        again_every: Drop the sequence after this many tokens, and begin it again.
    """
    sampling = Sampling(**{"max_tokens": NUM_TOKENS, "seed": 5, **parameters})
    prompt, tokens, runner = prepared.prompt.token_ids, [], model.runner
    ends = runner.info.eos_token_ids
    is_over = False
    while len(tokens) < sampling.max_tokens and not is_over:
        if not tokens or (again_every and len(tokens) % again_every == 0):
            runner.drop("one")
            known = [*prompt, *tokens]
            runner.begin("one", known, [], sampling, num_answered=len(tokens), form_nbytes=1)
            (chosen,) = runner.run([Chunk("one", 0, len(known), samples=True)], [], {})
        else:
            (chosen,) = runner.run([], ["one"], {})
        assert runner.failed == {}
        is_over = chosen.token_id in ends
        tokens += [] if is_over else [chosen.token_id]
    runner.drop("one")
    return model.prompts._tokenizer.decode(tokens), is_over


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("again_every", [0, 1, 3])
def test_json_of_a_schema(
    model: Model, text: Prepared, temperature: float, again_every: int
) -> None:
    asked = {"json_schema": json.dumps(SCHEMA), "temperature": temperature}
    said, is_over = answer(model, text, again_every=again_every, **asked)
    assert said == answer(model, text, **asked)[0]
    assert is_over
    Draft202012Validator(SCHEMA).validate(json.loads(said))


def test_an_expression_and_a_choice(model: Model, text: Prepared) -> None:
    said, is_over = answer(model, text, regex="[ab]{3,9}(x|yz)", temperature=1.0)
    assert is_over
    assert re.fullmatch("[ab]{3,9}(x|yz)", said)
    options = ("a red circle", "é😀", '"')
    assert answer(model, text, choice=options, temperature=1.0)[0] in options
    assert answer(model, text, choice=("",)) == ("", True)


def test_an_answer_that_is_complete_ends_whatever_else_is_asked(
    model: Model, text: Prepared
) -> None:
    (eos,) = model.runner.info.eos_token_ids
    first = model.prompts._tokenizer.encode("no", add_special_tokens=False).ids[0]
    against = {"min_tokens": 40, "logit_bias": ((first, -100.0), (eos, -100.0))}
    assert answer(model, text, choice=("no",), **against) == ("no", True)
    assert answer(model, text, choice=("no",), repetition_penalty=1.5, top_k=1) == ("no", True)


def test_a_limit_ends_it_anywhere(model: Model, text: Prepared) -> None:
    said, is_over = answer(model, text, json_schema='{"type":"object"}', max_tokens=1)
    assert (said[:1], is_over) == ("{", False)


def test_sequences_of_no_form_are_as_ever(model: Model, text: Prepared) -> None:
    """A sequence with a response format does not change the others of its step."""
    prompt, runner = text.prompt.token_ids, model.runner
    plain = Sampling(max_tokens=9)
    runner.begin("plain", list(prompt), [], plain)
    runner.begin("formed", list(prompt), [], Sampling(max_tokens=9, regex="a*"))
    chunks = [Chunk(name, 0, len(prompt), samples=True) for name in ("plain", "formed")]
    said = [[chosen.token_id] for chosen in runner.run(chunks, [], {})]
    for _ in range(8):
        for tokens, chosen in zip(said, runner.run([], ["plain", "formed"], {}), strict=True):
            tokens.append(chosen.token_id)
    assert said[0] == text.expected[:9]
    for name in ("plain", "formed"):
        runner.drop(name)
