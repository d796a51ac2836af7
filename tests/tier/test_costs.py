"""The cost model: fetches, waits and writes depend on measured times."""

from __future__ import annotations

import pytest

from afferent.tier.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILURES, Breaker
from afferent.tier.costs import EXPLORE_EVERY, CostModel, Limits
from afferent.types import MiB, ObjectKind

FEATURES, EMBEDDINGS = ObjectKind.FEATURES, ObjectKind.EMBEDDINGS
LIMITS = Limits(timeout_s=1.0, wait_s=5.0)


def measured(nbytes_per_s: float, *, lookup_s: float = 0.0005) -> CostModel:
    """Return a cost model after many fetches over one link."""
    model = CostModel(LIMITS)
    for _ in range(100):
        model.looked_up(lookup_s)
        model.fetched(8 * MiB, lookup_s + 8 * MiB / nbytes_per_s)
    return model


@pytest.mark.parametrize("gbit_per_s", [1, 10, 25, 100])
def test_the_link_is_learned(gbit_per_s: int) -> None:
    rate = gbit_per_s * 1e9 / 8
    model = measured(rate)
    assert model.nbytes_per_s == pytest.approx(rate, rel=0.02)
    assert model.fetch_s(50 * MiB) == pytest.approx(0.0005 + 50 * MiB / rate, rel=0.02)


def test_a_node_that_only_writes_learns_what_the_link_carries() -> None:
    """12.8 MB for a page: 60 ms to make; 102 ms at the initial guess of the link's rate."""
    model, page = CostModel(LIMITS), {"nbytes": 12_800_000, "made_us": 60_000}
    assert [model.keeps(FEATURES, **page) for _ in range(16)].count(True) == 1, "to learn"
    for took_s in (0.02, 1.0):  # after a slow write, a read may still be fast
        for _ in range(10):
            model.written(12_800_000, took_s)
        assert all(model.keeps(FEATURES, **page) for _ in range(10))


def test_what_is_made_sooner_is_not_asked_for() -> None:
    """12.8 MB for a page: 60 ms to make, 102 ms to fetch at 1 Gbit/s, 10 ms at 10 Gbit/s."""
    page = {"nbytes": 12_800_000, "cost_us": 60_000}
    assert not measured(1e9 / 8).choose(FEATURES, **page).asks
    assert measured(10e9 / 8).choose(FEATURES, **page).asks


def test_the_choice_is_the_better_one_within_a_tenth() -> None:
    """The chosen action for a stored object costs at most 10 % more than the better one."""
    for gbit_per_s in (1, 2.5, 10, 25, 100):
        for nbytes in (50_000, 500_000, 5_000_000, 50_000_000):
            for make_s in (0.0005, 0.005, 0.05, 0.5, 5.0):
                model = measured(gbit_per_s * 1e9 / 8)
                for _ in range(200):
                    model.was_there(FEATURES, True)
                choice = model.choose(FEATURES, nbytes=nbytes, cost_us=round(make_s * 1e6))
                fetch_s = model.fetch_s(nbytes)
                chosen_s = fetch_s if choice.asks else make_s
                # The best choice includes the lookup, which tells whether the object is there.
                best_s = min(fetch_s, make_s) + model.lookup_s
                assert chosen_s <= 1.1 * best_s, (gbit_per_s, nbytes, make_s, choice)


def test_what_is_never_found_is_asked_for_seldom() -> None:
    model = measured(10e9 / 8)
    item = {"nbytes": MiB, "cost_us": 10_000}
    assert model.choose(FEATURES, **item).asks
    for _ in range(300):
        model.was_there(FEATURES, False)
    asked = [model.choose(FEATURES, **item).asks for _ in range(6 * EXPLORE_EVERY)]
    assert sum(asked[:EXPLORE_EVERY]) >= 4, "at first, to learn"
    assert 2 <= sum(asked[2 * EXPLORE_EVERY :]) <= 4, "later now and then"
    assert model.choose(EMBEDDINGS, **item).asks, "kinds are apart"
    for _ in range(300):
        model.was_there(FEATURES, True)
    assert model.choose(FEATURES, **item).asks


def test_making_takes_what_it_takes_here() -> None:
    model = measured(10e9 / 8)
    item = {"nbytes": MiB, "cost_us": 1000}
    for _ in range(100):
        model.made(FEATURES, nbytes=MiB, expected_us=1000, took_us=4000)
    assert model.make_s(FEATURES, **item) == pytest.approx(0.004, rel=0.01)
    assert model.make_s(EMBEDDINGS, **item) == pytest.approx(0.001)
    model.made(FEATURES, nbytes=MiB, expected_us=1000, took_us=0)
    assert model.make_s(FEATURES, **item) == pytest.approx(0.004, rel=0.01)


def test_what_nobody_expects_is_learned_by_what_it_took() -> None:
    """An encoder's time is a guess until it was measured, so a few items are made for that."""
    model, item = measured(10e9 / 8), {"nbytes": 4 * MiB, "cost_us": 50_000}
    for _ in range(100):
        model.was_there(EMBEDDINGS, True)
    asked = [model.choose(EMBEDDINGS, **item).asks for _ in range(32)]
    assert 0 < asked.count(False) <= 4, "though all of them would seem to pay"
    for _ in range(30):
        model.made(EMBEDDINGS, nbytes=MiB, expected_us=0, took_us=25_000)
    assert model.make_s(EMBEDDINGS, **item) == pytest.approx(0.1, rel=0.01)
    assert all(model.choose(EMBEDDINGS, **item).asks for _ in range(32))
    for _ in range(30):
        model.made(EMBEDDINGS, nbytes=MiB, expected_us=0, took_us=100)
    assert not model.choose(EMBEDDINGS, **item).asks, "a fast encoder is faster than this link"
    assert not model.keeps(EMBEDDINGS, nbytes=MiB, made_us=100)


def test_a_link_that_has_become_slow_is_left() -> None:
    model = measured(10e9 / 8)
    item = {"nbytes": 5 * MiB, "cost_us": 50_000}
    num_late = 0
    while (choice := model.choose(FEATURES, **item)).asks and num_late < 20:
        model.came_late(item["nbytes"], choice.fetch_s)
        num_late += 1
    assert 1 <= num_late <= 2
    num_tries = 0
    while model.nbytes_per_s < 1e9:
        num_tries += 1
        assert num_tries < 100, "what is fast again is used again"
        if model.choose(FEATURES, **item).asks:
            model.fetched(item["nbytes"], item["nbytes"] / 1.25e9)


def test_deadlines_follow_from_what_making_takes() -> None:
    model = measured(10e9 / 8)
    short = model.choose(FEATURES, nbytes=MiB, cost_us=10_000)
    long = model.choose(FEATURES, nbytes=MiB, cost_us=300_000)
    longest = model.choose(FEATURES, nbytes=MiB, cost_us=60_000_000)
    assert short.fetch_s == 0.05
    assert long.fetch_s == pytest.approx(0.6)
    assert (longest.fetch_s, longest.wait_s) == (LIMITS.timeout_s, LIMITS.wait_s)
    assert (short.waits, long.waits, longest.waits) == (False, True, True)
    assert long.wait_s == pytest.approx(0.45 + model.fetch_s(MiB))


def test_nobody_waits_for_what_another_node_may_not_keep() -> None:
    model, item = measured(10e9 / 8), {"nbytes": 1000, "cost_us": 500_000}
    for kind in ObjectKind:
        choice = model.choose(kind, **item)
        assert choice.asks
        assert choice.waits == (kind in (FEATURES, EMBEDDINGS))


def test_what_is_made_sooner_than_fetched_is_not_kept() -> None:
    model = measured(1e9 / 8)
    assert not model.keeps(FEATURES, nbytes=12_800_000, made_us=60_000)
    assert model.keeps(FEATURES, nbytes=12_800_000, made_us=200_000)
    assert model.keeps(EMBEDDINGS, nbytes=12_800_000, made_us=0), "nobody has measured it"


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed(now_s=1.0)
    breaker.succeeded()
    for _ in range(MAX_FAILURES):
        assert not breaker.is_open
        breaker.failed(now_s=1.0)
    assert (breaker.is_open, breaker.num_openings) == (True, 1)
    assert breaker.probe_in_s(now_s=1.0) == FIRST_PAUSE_S
    breaker.failed(now_s=9.0)  # a failure from an earlier call
    assert (breaker.num_openings, breaker.probe_in_s(now_s=9.0)) == (1, 0.0)


def test_probes_come_less_and_less_often_and_one_ends_it() -> None:
    breaker = Breaker()
    breaker.trip(now_s=0.0)
    assert breaker.probe_in_s(now_s=0.0) == 0.0
    pauses = []
    for _ in range(12):
        breaker.probe_failed(now_s=0.0)
        pauses.append(breaker.probe_in_s(now_s=0.0))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (2 * FIRST_PAUSE_S, LONGEST_PAUSE_S)
    breaker.succeeded()
    assert not breaker.is_open
    for _ in range(MAX_FAILURES):
        breaker.failed(now_s=0.0)
    assert breaker.probe_in_s(now_s=0.0) == FIRST_PAUSE_S
