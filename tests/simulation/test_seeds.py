"""Many short runs of a server, each from a seed; see docs/simulation.md."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.ablations import ABLATIONS
from tests.simulation.batches import results
from tests.simulation.drawing import plan_of
from tests.simulation.running import run_seed, stage
from tests.simulation.shrinking import kind_of, shrink

NUM_SEEDS, PART = 500, 100
"""`make simulate` runs any number of them."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PART))
def test_no_seed_breaks_a_promise(first: int) -> None:
    with stage():
        for seed in range(first, first + PART):
            result = run_seed(seed)
            assert not result.violation, (
                f'seed {seed}: {result.violation}; make simulate ARGS="--replay {seed}"'
            )
            assert result.ends.total() <= len(plan_of(seed).tasks)


@pytest.mark.parametrize(
    "seed",
    [
        8635,
        9686,
        11468,
        17605,
        27299,
        32374,
        35599,
        41909,
        42866,
        43481,
        47527,
        54800,
        65086,
        77891,
        90037,
        95564,
        5086691,
        5096226,
    ],
)
def test_seeds_that_once_failed(seed: int) -> None:
    """Some failed by a call beyond its deadline, the others by defects of the simulator."""
    with stage():
        assert not run_seed(seed).violation


def test_seeds_do_most_of_what_they_are_to_do() -> None:
    """Most requests are answered: a simulation in which everything is refused finds nothing."""
    with stage():
        found = [run_seed(seed) for seed in range(40)]
    ends = sum((result.ends for result in found), start=Counter[str]())
    assert ends["answered"] > ends.total() / 2
    assert len(ends) >= 5  # and most other outcomes occur
    assert len({fault for result in found for _, fault in result.pairs}) >= 7


def test_a_run_is_the_same_every_time_and_without_an_element_another() -> None:
    with stage():
        first, again = run_seed(11), run_seed(11)
        shorter = run_seed(11, dropped=frozenset(plan_of(11).elements[:2]))
    assert first == again
    assert shorter.digest != first.digest


def test_other_processes_come_to_the_same() -> None:
    here, there = results(0, 4, 1, None), results(0, 4, 2, None)
    assert [each.digest for each in here] == [each.digest for each in there]


def test_what_fails_is_made_shorter_and_fails_likewise() -> None:
    chosen = next(each for each in ABLATIONS if each.name == "hello-lets-go")
    with stage(), chosen.applied():
        violation = run_seed(chosen.seed).violation
        elements = plan_of(chosen.seed).elements
        dropped = shrink(chosen.seed, elements, violation)
        short = run_seed(chosen.seed, dropped=dropped)
    assert kind_of(short.violation) == kind_of(violation)
    assert len(elements) - len(dropped) <= 6
