"""Measure the cost of structured output.

The built-in model and engine run without a server: 16 answers at a time, one token each per step. A
sample has 96 steps, after prompts of 24 tokens that are already computed. The result is tokens a
second, of all 16 answers together. All answers are sampled at temperature 1. *Plain* answers are
free; the others have a response format that does not end earlier: a list of numbers, records of a
schema, text of an expression. The model was not trained for these formats, so it gains nothing from
them.

The baseline is *plain*. `tried_ms` is the cost of a new format before the first token: a process of
its own checks it, and the worker compiles it. It is not part of the steps.

Expected before the measurement: 0.9 to 0.98 times as many tokens with response formats. A thread
finds the masks beside the model, which has one of two cores; the remaining costs are applying the
masks, and a message to the thread.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import afferent
from afferent.builtin.engine import messages as m
from afferent.builtin.engine.asked_form import Form, form_of
from afferent.builtin.engine.form.grammar import tokenizer_of
from afferent.builtin.engine.form.main import FormTrials
from afferent.builtin.engine.model.runner import Runner
from afferent.errors import InternalError
from afferent.media.families.registry import describe
from afferent.schedule.step import Chunk
from afferent.types import Sampling
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "How many tokens a second, with answers of a given form and without?"
COLUMNS = ("form", "tokens_per_s", "ratio", "tried_ms")

_FOLDER = Path(afferent.__file__).parent / "builtin" / "models" / "shapes"
_BATCH, _NUM_STEPS, _NUM_PROMPT = 16, 96, 24
_GOAL_RATIO = 0.85
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "kind": {"enum": ["star", "circle", "square"]},
        "size": {"type": ["integer", "null"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {
        "json_schema": json.dumps({"type": "array", "items": {"type": "number"}, "minItems": 1000})
    },
    "records": {"json_schema": json.dumps({"type": "array", "items": _RECORD, "minItems": 1000})},
    "text": {"regex": r"([A-Za-z]{1,8}[ ,.]){1000}"},
}

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    return len(_FORMS) * (_num_samples(quick=quick) + 1)


def run(*, quick: bool, after_sample: AfterSample, steps: int = _NUM_STEPS) -> Report:
    """Run the benchmark with this number of steps in a sample."""
    report = Report("forms", QUESTION)
    report.notes.append(
        "ratio: tokens a second beside plain, of the samples taken in the same turn"
    )
    torch.set_num_threads(1)
    family = describe(_FOLDER)
    if family is None:
        raise InternalError("the built-in model has no family")
    answers = _Answers(Runner(_FOLDER, family), steps)
    meter = BusyMeter()
    sides = {name: functools.partial(answers.rate, name) for name in _FORMS}
    samples = alternate(sides, num_samples=_num_samples(quick=quick), after_sample=after_sample)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    for name, rates in samples.items():
        ratios = [rate / plain for rate, plain in zip(rates, samples["plain"], strict=True)]
        measured = {"tokens_per_s": rates, "ratio": ratios}
        form = form_of(Sampling(max_tokens=1, **_FORMS[name]))
        if form is not None:
            measured["tried_ms"] = _tried_ms(form, len(rates))
            ratio = statistics.median(ratios)
            what = f"{name}: tokens beside plain >= {_GOAL_RATIO:g}"
            report.goals.append(Goal(what, ratio >= _GOAL_RATIO, ratio))
        report.rows.append(Row({"form": name}, measured))
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


class _Answers:
    """Answers of the built-in model, 16 at a time."""

    def __init__(self, runner: Runner, steps: int) -> None:
        self._runner, self._steps, self._seeds = runner, steps, itertools.count()

    def rate(self, name: str) -> float:
        """Return tokens a second, of all answers together."""
        names = [f"{number}" for number in range(_BATCH)]
        chunks = [Chunk(each, 0, _NUM_PROMPT, samples=True) for each in names]
        for each in names:
            sampling = Sampling(
                max_tokens=2 * self._steps,
                temperature=1.0,
                seed=next(self._seeds),
                ignore_eos=True,
                **_FORMS[name],
            )
            prompt = list(range(100, 100 + _NUM_PROMPT))
            self._runner.begin(each, prompt, [], sampling, form_nbytes=1)
        self._runner.run(chunks, [], {})
        start_s = time.perf_counter()
        for _ in range(self._steps):
            self._runner.run([], names, {})
            if self._runner.failed:
                raise InternalError(f"an answer can't go on: {self._runner.failed}")
        seconds = time.perf_counter() - start_s
        for each in names:
            self._runner.drop(each)
        return _BATCH * self._steps / seconds


def _tried_ms(form: Form, num: int) -> list[float]:
    async def main() -> list[float]:
        trials = FormTrials(tokenizer_of(_FOLDER, eos_token_ids=[2]))
        spent = []
        for number in range(num):
            start_s = time.perf_counter()
            await trials.verdict(m.TryForm(number, form))
            spent.append(1e3 * (time.perf_counter() - start_s))
        return spent

    return asyncio.run(main())
