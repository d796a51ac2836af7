"""Parameters that change logits, against a reference that goes token by token."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from afferent.builtin.engine.model import logit_rules
from afferent.builtin.engine.model.logit_rules import LogitRules
from afferent.builtin.engine.model.sampling import Wanted, choose
from afferent.types import Sampling

VOCABULARY = 40
EOS = [2, 5]


@dataclass(frozen=True, slots=True)
class Case:
    sampling: Sampling
    prompt: list[int]
    answer: list[int]

    @property
    def rules(self) -> LogitRules | None:
        return rules_of(self.sampling, self.prompt, self.answer)


def rules_of(sampling: Sampling, prompt: list[int], answer: list[int]) -> LogitRules | None:
    return LogitRules.of(sampling, [*prompt, *answer], num_answered=len(answer), eos_token_ids=EOS)


def obvious(logits: list[float], case: Case) -> list[float]:
    """Apply the rules one token after another."""
    sampling, counts, changed = case.sampling, Counter(case.answer), []
    for token, given in enumerate(logits):
        value = given
        if len(case.answer) < sampling.min_tokens and token in {*EOS, *sampling.stop_token_ids}:
            value = -float("inf")
        for biased, bias in sampling.logit_bias:
            if biased == token:
                value += bias
        if token in case.prompt or token in case.answer:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= sampling.frequency_penalty * counts[token]
        value -= sampling.presence_penalty * (counts[token] > 0)
        changed.append(value)
    return changed


def random_case(rng: random.Random) -> Case:
    def tokens(most: int, beyond: int = 0) -> list[int]:
        return [rng.randrange(VOCABULARY + beyond) for _ in range(rng.randrange(most))]

    given: dict[str, Any] = {}
    if rng.random() < 0.5:
        given["repetition_penalty"] = rng.uniform(0.5, 2.0)
    if rng.random() < 0.5:
        given["frequency_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.5:
        given["presence_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.5:
        biased = rng.sample(range(VOCABULARY + 5), rng.randrange(1, 6))
        given["logit_bias"] = tuple((token, rng.uniform(-100, 100)) for token in biased)
    if rng.random() < 0.5:
        given |= {"min_tokens": rng.randrange(20), "stop_token_ids": tuple(tokens(3, 5))}
    return Case(Sampling(max_tokens=50, **given), tokens(30, 5), tokens(100))


def test_as_the_obvious_way() -> None:
    rng = random.Random(5)
    num_ruled = 0
    for _ in range(60):
        cases = [random_case(rng) for _ in range(rng.randrange(1, 9))]
        logits = torch.tensor(
            [[rng.uniform(-8, 8) for _ in range(VOCABULARY)] for _ in cases], dtype=torch.float32
        )
        expected = [obvious(row, case) for row, case in zip(logits.tolist(), cases, strict=True)]
        rules = [case.rules for case in cases]
        logit_rules.apply(logits, rules)
        torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        num_ruled += sum(each is not None for each in rules)
    assert num_ruled > 150


def test_who_asks_for_nothing_has_no_rules() -> None:
    plain = Sampling(max_tokens=9, temperature=0.5, top_k=3, min_p=0.2, stop_token_ids=(7,), seed=1)
    assert rules_of(plain, [1, 2], []) is None
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    logit_rules.apply(logits, [None, None])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "presence_penalty": -0.5},
        {"min_tokens": 70, "stop_token_ids": (7, 9)},
        {"repetition_penalty": 0.8, "frequency_penalty": 1.0, "min_tokens": 3},
    ],
)
def test_what_begins_again_goes_on_as_it_would_have(parameters: dict[str, Any]) -> None:
    """Rules that are rebuilt from the answer so far equal those that saw each token."""
    rng = random.Random(11)
    sampling, prompt = Sampling(max_tokens=200, **parameters), [1, 1, 30, 3]
    kept = rules_of(sampling, prompt, [])
    assert kept is not None
    answer: list[int] = []
    for _ in range(150):  # more distinct tokens than the initial capacity
        answer.append(rng.randrange(VOCABULARY * 4))
        kept.add(answer[-1])
        anew = rules_of(sampling, prompt, answer)
        first, second = (torch.linspace(-4, 4, VOCABULARY * 4).repeat(1, 1) for _ in range(2))
        logit_rules.apply(first, [kept])
        logit_rules.apply(second, [anew])
        assert torch.equal(first, second)


def test_the_rules_of_some_leave_others_alone() -> None:
    logits = torch.stack([torch.linspace(0, 1, VOCABULARY)] * 3)
    last = VOCABULARY - 1
    forced = Sampling(max_tokens=1, logit_bias=((4, 100.0),))
    greedy, drawn = Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=0.01, seed=3)
    wanted = [
        Wanted(greedy, 5),
        Wanted(forced, 5, rules_of(forced, [1], [])),
        Wanted(drawn, 5),
    ]
    before = logits.clone()
    assert choose(logits, wanted)[:2] == [last, 4]
    assert torch.equal(logits, before), "log-probabilities are those of the model"


def test_rules_come_before_the_draw() -> None:
    """A token that is forbidden or biased down is not drawn, and does not count for top_k."""
    logits = torch.tensor([[9.0, 1.0, 8.0, 1.0, 1.0, 7.0]])
    sampling = Sampling(
        max_tokens=9, temperature=1.0, top_k=1, min_tokens=1, logit_bias=((0, -50.0),)
    )
    for index in range(20):
        rules = rules_of(sampling, [3], [])
        (token,) = choose(logits, [Wanted(sampling, index, rules)])
        assert token in (1, 3, 4)
