"""Without each safeguard, some seed fails that passes otherwise."""

from __future__ import annotations

import contextlib

import pytest

from tests.simulation.ablations import ABLATIONS, LAYERS, Ablation, switched_off
from tests.simulation.running import run_seed, stage

SOON = 300
"""Seeds that are tried if a change has moved the listed one; --storm tries more."""


def missed_by(chosen: Ablation, limit: int) -> int | None:
    """Return a seed that fails: the listed one, or else the first of ``limit`` others.

    A seed's history changes with the messages that the store sends.
    """
    with stage(), chosen.applied():
        seeds = (chosen.seed, *range(limit))
        return next((seed for seed in seeds if run_seed(seed).violation), None)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chosen", ABLATIONS, ids=lambda each: each.name)
def test_a_safeguard_is_missed(chosen: Ablation, request: pytest.FixtureRequest) -> None:
    is_long = request.config.getoption("--storm")
    seed = missed_by(chosen, 10_000 if is_long else SOON)
    hint = "" if is_long else " (a change may have moved its seed: --storm looks for another)"
    assert seed is not None, f"no seed fails without this safeguard: {chosen.what}{hint}"
    with stage():
        assert not run_seed(seed).violation


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYERS)
def test_each_of_two_layers_alone_keeps_the_promise_that_both_together_keep(name: str) -> None:
    """A handle that one layer does not refuse is refused by the other."""
    whole, layers = next(each for each in ABLATIONS if each.name == name), LAYERS[name]
    with stage():
        with whole.applied():
            assert run_seed(whole.seed).violation
        for left_on in layers:
            others = [each for each in layers if each is not left_on]
            with contextlib.ExitStack() as stack:
                for each in others:
                    stack.enter_context(switched_off(each))
                assert not run_seed(whole.seed).violation, left_on


def test_the_safeguards_are_many_and_have_a_name_each() -> None:
    assert len({each.name for each in ABLATIONS}) == len(ABLATIONS) >= 40
