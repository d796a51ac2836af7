"""Parameters that change logits in the runner: as in plain ``generate``, with preemptions too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from afferent.schedule.step import Chunk
from afferent.types import Sampling
from tests.engine.runner_model import MODELS, Model, Prepared, prepare_all

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return MODELS["qwen2"].make_and_load(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def all_prepared(model: Model) -> list[Prepared]:
    return prepare_all(model)


@pytest.fixture(scope="module")
def prepared(all_prepared: list[Prepared]) -> Prepared:
    """Return a request with items: their placeholders are tokens, too."""
    return next(each for each in all_prepared if each.items)


@pytest.fixture(scope="module")
def text(all_prepared: list[Prepared]) -> Prepared:
    return next(each for each in all_prepared if not each.items)


def answer(
    model: Model, prepared: Prepared, *, again_every: int = 0, **parameters: Any
) -> list[int]:
    """Return the tokens of the answer.

    Args:
        again_every: Drop the sequence after this many tokens, and begin it again.
    """
    sampling = Sampling(max_tokens=NUM_TOKENS, **parameters)
    prompt, tokens = prepared.prompt.token_ids, []
    for number in range(NUM_TOKENS):
        if number == 0 or (again_every and number % again_every == 0):
            model.runner.drop("one")
            known = [*prompt, *tokens]
            model.runner.begin("one", known, prepared.items, sampling, num_answered=len(tokens))
            chunk = Chunk("one", 0, len(known), samples=True)
            (chosen,) = model.runner.run([chunk], [], prepared.embeddings)
        else:
            (chosen,) = model.runner.run([], ["one"], {})
        tokens.append(chosen.token_id)
    model.runner.drop("one")
    return tokens


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_as_generate(model: Model, text: Prepared, penalty: float) -> None:
    ids = torch.tensor([text.prompt.token_ids])
    theirs = GenerationMixin.generate(
        model.reference,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        repetition_penalty=penalty,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
    )
    expected = theirs[0, ids.shape[1] :].tolist()
    assert answer(model, text, repetition_penalty=penalty, min_tokens=NUM_TOKENS) == expected
    assert answer(model, text, min_tokens=NUM_TOKENS) != expected


@pytest.mark.parametrize("again_every", [1, 5])
@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"frequency_penalty": 0.7, "temperature": 1.3, "seed": 5, "min_p": 0.01},
        {"logit_bias": ((5, 3.0), (6, -3.0)), "min_tokens": 9, "temperature": 2.0, "seed": 6},
    ],
)
def test_what_was_preempted_goes_on_as_it_would_have(
    model: Model, prepared: Prepared, parameters: dict[str, Any], again_every: int
) -> None:
    at_once = answer(model, prepared, **parameters)
    assert answer(model, prepared, again_every=again_every, **parameters) == at_once
    assert at_once != answer(model, prepared), "the parameters change something"


def test_a_frequency_penalty_spreads_the_answer(model: Model, prepared: Prepared) -> None:
    assert len(set(answer(model, prepared, frequency_penalty=2.0, presence_penalty=2.0))) > len(
        set(answer(model, prepared))
    )


class OtherRank:
    """A group in which rank 0 broadcasts other tokens than this rank has chosen."""

    def broadcast(self, tokens: list[int]) -> list[int]:
        return [token ^ 1 for token in tokens]


def test_ranks_remember_what_the_first_of_them_chose(
    model: Model, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties and counts follow the tokens of rank 0."""
    parameters = {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "min_tokens": 5}
    monkeypatch.setattr(model.runner, "_group", OtherRank())
    heard = answer(model, prepared, **parameters)
    again = answer(model, prepared, again_every=3, **parameters)
    assert heard == again


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_overflow_fails_the_one_request(
    model: Model, prepared: Prepared, text: Prepared, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the step get their tokens, drawn or likeliest."""
    runner = model.runner
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.5, seed=1)
    for name, each in (("bad", text), ("good", prepared)):
        runner.begin(name, each.prompt.token_ids, each.items, sampling)
    chunks = [
        Chunk(name, 0, len(each.prompt.token_ids), samples=True)
        for name, each in (("bad", text), ("good", prepared))
    ]
    logits = runner._decoder.logits

    def overflown(*args: Any) -> torch.Tensor:
        found = logits(*args).clone()
        found[0, 3] = number
        return found

    monkeypatch.setattr(runner._decoder, "logits", overflown)
    chosen = runner.run(chunks, [], prepared.embeddings)
    assert list(runner.failed) == ["bad"]
    monkeypatch.undo()
    for name in ("bad", "good"):
        runner.drop(name)
    runner.begin("good", prepared.prompt.token_ids, prepared.items, sampling)
    (alone,) = runner.run(chunks[1:], [], prepared.embeddings)
    runner.drop("good")
    assert runner.failed == {}
    assert chosen[1].token_id == alone.token_id
