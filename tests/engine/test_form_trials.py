"""The compile process for response formats: its verdicts, its limits, and its deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.asked_form import Form, form_of
from afferent.builtin.engine.form import main, trial
from afferent.builtin.engine.form.grammar import tokenizer_of
from afferent.builtin.engine.form.main import FormTrials
from afferent.builtin.engine.form.trial import Verdict
from afferent.errors import ConfigError, InvalidForm
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Sampling

SHAPES = BUILT_IN_MODELS / "shapes"
TOKENIZER = tokenizer_of(SHAPES, eos_token_ids=[2], vocab_size=512)


def schema(value: Any) -> Form:
    return Form("json_schema", value if isinstance(value, str) else json.dumps(value))


def regex(text: str) -> Form:
    return Form("regex", text)


def tried(*forms: Form) -> list[Verdict]:
    async def run() -> list[Verdict]:
        trials = FormTrials(TOKENIZER)
        return [await trials.verdict(m.TryForm(0, form)) for form in forms]

    return asyncio.run(run())


FINE = [
    schema({"type": "object"}),
    schema("true"),
    schema({}),
    schema({"type": "string", "x-anything": 1, "deprecated": True, "examples": ["a"]}),
    schema({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
    schema(
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    ),
    schema({"type": "integer", "multipleOf": 39_999}),
    schema({"type": "number", "multipleOf": 1e-8}),
    schema({"anyOf": [{"type": "integer", "multipleOf": each} for each in (7, 60, 90)]}),
    schema({"properties": {"multipleOf": {"const": "x" * 8192}, "n": {"multipleOf": 1e9}}}),
    regex(r"\p{L}{1,5000}"),
    regex(r"^[a-z]+@[a-z]+\.(com|org)$"),
    Form("choice", json.dumps(["yes", "no", 'a "quote"/ \\ and\na line', "", "\x00|()", "é😀"])),
]


@pytest.mark.parametrize("form", FINE, ids=lambda form: form.text[:40])
def test_forms_that_can_be_followed(form: Form) -> None:
    (verdict,) = tried(form)
    assert verdict.failure is None
    assert verdict.nbytes < 32 << 20


REFUSED = [
    (schema("{"), "not valid JSON"),
    (schema("[]"), "must be an object"),
    (schema("false"), "anyOf is empty"),
    (schema('{"a":' * 60_000), "nested too deep"),
    (schema({"type": "strnig"}), "Invalid type: strnig"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
    (schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "oneOf"),
    (schema({"$ref": "https://example.org/schema.json"}), "example.org"),
    (schema({"$ref": "#"}), "no answer can have this form"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (schema({"type": "integer", "multipleOf": 1_000_003}), "multipleOf are too large together"),
    (schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}), "multipleOf are too large"),
    (schema({"multipleOf": 10**400}), "too large together"),
    (schema({"multipleOf": 1e-300}), "too large together"),
    (schema({"const": "x" * 8193}), "has 8193 characters, and 8192 is the limit"),
    (schema({"enum": [1, {"a": ["x" * 9000]}]}), "has 9000 characters"),
    (schema({"properties": {"x" * 9000: {}}}), "has 9000 characters"),
    (schema({"enum": [f"value-{number}" for number in range(20_000)]}), "too big"),
    (Form("choice", json.dumps(["a", "x" * 9000])), "has 9000 characters"),
    (regex("("), "unclosed group"),
    (regex(r"(a)\1"), "backreferences"),
    (regex("(.{1,50}){1,50}"), "too much"),
    (regex(r"a\Bz{3}[^\x00-\x{10FFFF}]"), "can't be followed"),
]


def test_counts_decide_and_not_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of work decide, not time: other limits of time and memory give the same verdicts."""
    monkeypatch.setattr(trial, "CPU_S", 50 * trial.CPU_S)
    monkeypatch.setattr(trial, "MEMORY_NBYTES", 2 * trial.MEMORY_NBYTES)
    assert [verdict.failure is None for verdict in tried(*FINE)] == [True] * len(FINE)
    forms = [form for form, _ in REFUSED]
    assert [verdict.failure is None for verdict in tried(*forms)] == [False] * len(forms)


@pytest.mark.parametrize(("form", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_forms_that_can_not(form: Form, why: str) -> None:
    (verdict,) = tried(form)
    assert verdict.failure is not None
    assert verdict.failure.code == InvalidForm.code
    assert why in verdict.failure.message
    assert "can't be followed: " in verdict.failure.message
    assert "coerce_one_of" not in verdict.failure.message


def dies_by(end: Callable[[], object]) -> Callable[..., None]:
    def attempt(*_: object) -> None:
        end()

    return attempt


@pytest.mark.parametrize(
    "end", [lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: bytearray(1 << 30)]
)
def test_who_tries_may_die(monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]) -> None:
    monkeypatch.setattr(trial, "_try", dies_by(end))
    others = psutil.Process().children()
    (verdict,) = tried(regex("a"))
    assert verdict.failure is not None
    assert verdict.failure.code == InvalidForm.code
    assert "too much memory" in verdict.failure.message
    assert psutil.Process().children() == others, "it is waited for"


def test_time_is_what_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        while True:
            pass

    monkeypatch.setattr(trial, "_try", dies_by(loop))
    monkeypatch.setattr(trial, "CPU_S", 0.2)
    monkeypatch.setattr(main, "_TRIAL_TIMEOUT_S", 120.0)  # generous, as the machine may be busy
    (verdict,) = tried(regex("a"))
    assert verdict.failure is not None
    assert "too much time" in verdict.failure.message


def test_who_gets_no_time_at_all_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not blame the request."""
    monkeypatch.setattr(trial, "_try", dies_by(signal.pause))
    monkeypatch.setattr(main, "_TRIAL_TIMEOUT_S", 0.2)
    others = psutil.Process().children()
    (verdict,) = tried(regex("a"))
    assert verdict.failure is not None
    assert verdict.failure.code == "engine_unavailable"
    assert set(psutil.Process().children()) <= set(others)


@pytest.mark.parametrize("where", ["os.nice", "sandbox.enter", "os.open"])
def test_who_can_not_begin_says_so(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The error does not blame the request, which may be sent again."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(f"afferent.builtin.engine.form.trial.{where}", refuse)
    (verdict,) = tried(regex("a"))
    assert verdict.failure is not None
    assert verdict.failure.code == "engine_unavailable"
    assert "try again" in verdict.failure.message


@pytest.mark.parametrize("call", ["os.pipe", "os.fork", "connect_read_pipe"])
def test_who_can_not_try_says_so_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    async def run() -> Verdict:
        if call == "connect_read_pipe":
            monkeypatch.setattr(asyncio.get_running_loop(), call, refuse)
        else:
            monkeypatch.setattr(main.os, call.removeprefix("os."), refuse)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - to count is all
        verdict = await FormTrials(TOKENIZER).verdict(m.TryForm(0, FINE[0]))
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
        return verdict

    others = psutil.Process().children()
    failure = asyncio.run(run()).failure
    assert failure is not None
    assert failure.code == "engine_unavailable"
    assert failure.message == "the form of the answer could not be tried; try again"
    assert set(psutil.Process().children()) <= set(others)


def test_it_can_do_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The sandbox allows no new file, no socket and no inherited descriptor."""
    (tmp_path / "known").write_text("x")
    known = os.open(tmp_path / "known", os.O_RDONLY)

    def look(*_: object) -> Verdict:
        import socket

        found = []
        for attempt in (
            lambda: socket.socket(),
            lambda: (tmp_path / "new").write_text("x"),
            lambda: os.fstat(known),
        ):
            try:
                attempt()
            except OSError:
                continue
            found.append(1)
        return Verdict(None, len(found))

    monkeypatch.setattr(trial, "_try", look)
    (verdict,) = tried(regex("a"))
    os.close(known)
    assert verdict == Verdict(None, 0)


def test_many_at_once_are_all_answered() -> None:
    said: list[m.FormTried] = []

    async def run() -> None:
        trials = FormTrials(TOKENIZER)

        async def answer(number: int) -> None:
            form = regex("(" if number % 3 == 0 else f"a{{{number}}}")
            said.append(
                m.FormTried(number, (await trials.verdict(m.TryForm(number, form))).failure, 0)
            )

        asked: list[Awaitable[None]] = [answer(number) for number in range(12)]
        await asyncio.gather(*asked)

    asyncio.run(run())
    assert {each.number for each in said if each.failure is not None} == {0, 3, 6, 9}
    assert len(said) == 12


def test_one_form() -> None:
    assert form_of(Sampling(max_tokens=1)) is None
    assert form_of(Sampling(max_tokens=1, choice=("a",))) == Form("choice", '["a"]')
    with pytest.raises(InvalidForm):
        form_of(Sampling(max_tokens=1, regex="a", json_schema="{}"))
    assert regex("a").key != schema("a").key


def test_a_model_without_an_end() -> None:
    with pytest.raises(ConfigError):
        tokenizer_of(SHAPES, eos_token_ids=[])
    with pytest.raises(ConfigError):
        tokenizer_of(SHAPES / "nowhere", eos_token_ids=[2])


def test_without_tokens_nothing_is_tried() -> None:
    async def run() -> Verdict:
        return await FormTrials(None).verdict(m.TryForm(0, regex("a")))

    failure = asyncio.run(run()).failure
    assert failure is not None
    assert failure.code == "unsupported_parameter"
