"""Sampling: the drawn tokens, their frequencies, and that only the seed and the index matter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from afferent.builtin.engine.model.sampling import Wanted, choose, logprobs
from afferent.types import Sampling

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draws(num: int = 200, logits: torch.Tensor = LOGITS, **parameters: Any) -> list[int]:
    sampling = Sampling(**{"max_tokens": 1, "temperature": 2.0, "seed": 7, **parameters})
    return choose(logits.expand(num, -1), [Wanted(sampling, index) for index in range(num)])


def test_greedy() -> None:
    assert set(draws(temperature=0.0)) == {1}


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 5e-324])
def test_hardly_any_temperature(temperature: float) -> None:
    assert set(draws(temperature=temperature)) == {1}


def test_each_row_as_its_sequence_wants() -> None:
    greedy, other = Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=1.0, top_k=1)
    rows = torch.stack([LOGITS, LOGITS.flip(0), -LOGITS])
    assert choose(rows, [Wanted(greedy, 3), Wanted(other, 4), Wanted(greedy, 5)]) == [1, 2, 0]
    assert choose(rows[:0], []) == []


def test_optional_token_is_chosen_only_where_it_is_the_likeliest_of_all() -> None:
    without_best = np.packbits([1, 0, 1, 1], bitorder="little")
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=0.01, seed=7)):
        assert choose(LOGITS[None], [Wanted(sampling, 1, mask=without_best)]) == [3]
        assert choose(LOGITS[None], [Wanted(sampling, 1, mask=without_best, optional=3)]) == [2]
        everything = np.full(1, 15, np.uint8)
        assert choose(LOGITS[None], [Wanted(sampling, 1, mask=everything, optional=1)]) == [1]


def test_what_can_be_drawn() -> None:
    assert set(draws()) == {0, 1, 2, 3}
    assert set(draws(top_k=2)) == {1, 3}
    assert set(draws(top_k=100)) == {0, 1, 2, 3}
    assert set(draws(top_p=0.01)) == {1}
    assert set(draws(top_p=0.6)) == {1, 3}
    assert set(draws(min_p=0.3)) == {1, 2, 3}  # relative to the likeliest: 1, 0.61, 0.37, 0.22
    assert set(draws(min_p=0.5)) == {1, 3}
    assert set(draws(min_p=1.0)) == {1}
    assert set(draws(top_k=3, min_p=0.3, top_p=0.75)) == {1, 3}


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_as_often_as_it_is_likely(temperature: float) -> None:
    num = 1500
    counts = Counter(draws(num, temperature=temperature))
    likely = (LOGITS / temperature).softmax(-1).tolist()
    for token, probability in enumerate(likely):
        spread = (num * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - num * probability) < 4 * spread


def test_nobody_draws_otherwise_because_of_others() -> None:
    """Each request with its own parameters gets the same tokens in a batch as alone."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 500, generator=generator).bfloat16()  # with ties
    choices: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 2.0, "min_p": 0.01, "top_k": 50, "top_p": 0.9},
    ]
    samplings = [Sampling(max_tokens=1, seed=i, **choices[i % 6]) for i in range(len(logits))]
    wanted = [Wanted(sampling, i) for i, sampling in enumerate(samplings)]
    alone = [choose(logits[i : i + 1], [each])[0] for i, each in enumerate(wanted)]
    assert choose(logits, wanted) == alone
    assert len(set(alone)) > 20


def test_only_seed_and_index_matter() -> None:
    assert draws() == draws()
    assert draws(seed=8) != draws(seed=7)
    assert draws(seed=-1) == draws(seed=2**64 - 1)
    torch.manual_seed(1)
    np.random.default_rng(1).random()
    assert draws(seed=None) == draws(seed=0)


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 500, 999]] = 0.0
    assert set(draws(logits=logits)) == {3, 500, 999}


def test_logprobs() -> None:
    assert logprobs(LOGITS, Sampling(max_tokens=1), 2) is None
    scores = LOGITS.log_softmax(-1).tolist()
    sampling = Sampling(max_tokens=1, temperature=2.0, num_logprobs=2)
    made = logprobs(LOGITS, sampling, 2)
    assert made is not None
    assert made.logprob == pytest.approx(scores[2])
    assert [token for token, _ in made.top] == [1, 3]
    assert [value for _, value in made.top] == pytest.approx([scores[1], scores[3]])
    none = logprobs(LOGITS, Sampling(max_tokens=1, num_logprobs=0), 0)
    assert none is not None
    assert none.top == []
