"""Conformance checks of the sampling options that an engine's `info` lists as supported."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, get_args

import msgspec

from afferent.conformance.engine_trial import NotConforming, Said, Trial, require
from afferent.errors import InvalidForm
from afferent.types import FormField


async def does_what_it_supports(trial: Trial) -> None:
    """Check that each option in `info.supported` changes the answer as `Sampling` describes.

    Penalties and ``min_p`` are not checked: their effect depends on the model.
    """
    info = trial.engine.info
    supported = info.supported if info is not None else ()
    if "stop_token_ids" in supported:
        await _ends_at_tokens(trial)
    if "min_tokens" in supported:
        await _goes_on_for(trial)
    if "logit_bias" in supported:
        await _leans(trial)
    for name in get_args(FormField):
        if name in supported:
            await _keeps_to(trial, name)


async def _ends_at_tokens(trial: Trial) -> None:
    question = trial.question(0)
    stop = question.answer[-1]
    before = question.answer[: question.answer.index(stop)]
    for ignore_eos in (False, True):
        said = await trial.ask(question, stop_token_ids=(stop,), ignore_eos=ignore_eos)
        wanted = Said(before, reason="stop")
        require(said == wanted, f"with stop_token_ids={(stop,)} it says {said}")


async def _goes_on_for(trial: Trial) -> None:
    question = trial.question(0)
    num = len(question.answer) + 2
    said = await trial.ask(question, min_tokens=num, max_tokens=num)
    goes_on = len(said.token_ids) == num and said.token_ids[: num - 2] == question.answer
    require(goes_on, f"with min_tokens={num} it says {said}")


async def _leans(trial: Trial) -> None:
    question = trial.question(0)
    first = question.answer[0]
    said = await trial.ask(question, logit_bias=((first, -100.0),), max_tokens=1)
    require(said.token_ids[:1] != [first], f"a bias of -100 does not keep it from saying {first}")


_FORMS: Final[dict[FormField, tuple[Any, Callable[[str], object]]]] = {
    "json_schema": (
        '{"type": "object", "properties": {"n": {"enum": [3, 5]}}, "required": ["n"], '
        '"additionalProperties": false}',
        lambda text: msgspec.json.decode(text) in ({"n": 3}, {"n": 5}),
    ),
    "regex": ("[xyz]{3}[0-9]{2}", re.compile("[xyz]{3}[0-9]{2}").fullmatch),
    "choice": (("qqq", "zzz zz"), lambda text: text in ("qqq", "zzz zz")),
    "tools": (
        '{"functions": [{"name": "zz", "parameters": {"enum": [{"n": 3}]}}], "begin": "<call>", '
        '"end": "</call>", "is_special": false, "must_call": true, "is_parallel": false}',
        lambda text: text == '<call>{"name":"zz","arguments":{"n":3}}</call>',
    ),
}
"""Formats that no answer has by chance, with a check of each."""


async def _keeps_to(trial: Trial, name: FormField) -> None:
    """Check that an answer matches its format and ends there, and that invalid ones are refused."""
    text_of = trial.subject.text
    if text_of is None:
        raise NotConforming(f"it supports {name}: Subject.text has to say which text tokens are")
    asked, has_form = _FORMS[name]
    for temperature in (0.0, 1.0):
        given = {name: asked, "temperature": temperature, "max_tokens": 200}
        said = await trial.ask(trial.question(0), **given)
        text = text_of(said.token_ids)
        try:
            is_right = bool(has_form(text)) and said.reason == "stop"
        except msgspec.DecodeError:
            is_right = False
        require(is_right, f"with {name}={asked} it says {text!r}, and ends by {said.reason}")
    cut = await trial.ask(trial.question(0), **{name: asked, "max_tokens": 1})
    require(cut.reason == "length", f"with {name} and max_tokens=1 it ends by {cut.reason}")
    await _refuses(trial, {"json_schema": "{", "regex": "(", "tools": "{"}.get(name), name)


async def _refuses(trial: Trial, wrong: str | None, name: str) -> None:
    if wrong is None:
        return
    try:
        said = await trial.ask(trial.question(0), **{name: wrong})
    except InvalidForm:
        await trial.require_nothing_held(f"after a {name} that there can't be")
        return
    raise NotConforming(f"with {name}={wrong} it says {said}, not InvalidForm")
