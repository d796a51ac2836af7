"""Fair scheduling: bounds over random histories, and no memory leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from afferent.admission.shares import NAMELESS, Share
from afferent.admission.turns import Turns

NUM_HISTORIES = 2_000
QUANTUM = 8


def test_equal_items_go_on_in_order_of_arrival() -> None:
    turns: Turns[int] = Turns()
    for item in range(100):
        turns.enter(item, share=NAMELESS, cost=3)
    assert [_work_off(turns, 3) for _ in range(100)] == list(range(100))
    assert turns.first is None


def test_who_has_had_a_turn_begins_again_before_the_others() -> None:
    turns: Turns[str] = Turns()
    turns.enter("large", share=NAMELESS, cost=1000)
    turns.begin("large")
    turns.charge("large", 500)
    turns.enter("small", share=NAMELESS, cost=10)
    turns.leave("large")
    turns.enter("large", share=NAMELESS, cost=0)
    assert turns.first == "large"


def test_what_is_put_back_has_kept_its_place() -> None:
    turns: Turns[int] = Turns()
    for item in range(3):
        turns.enter(item, share=NAMELESS, cost=5)
    turns.begin(0)
    turns.begin(1)
    turns.put_back(1)
    turns.put_back(0)
    assert turns.first == 0
    assert turns.rank(0) < turns.rank(1) < turns.rank(2)


def test_tenants_that_had_the_same_keep_their_order_too() -> None:
    turns: Turns[int] = Turns()
    for item in range(2):
        turns.enter(item, share=Share(f"tenant {item}"), cost=1)
    turns.begin(0)
    turns.put_back(0)
    assert turns.first == 0
    assert turns.rank(0) < turns.rank(1)


def test_a_tenant_saves_nothing_up_while_it_is_idle() -> None:
    turns: Turns[str] = Turns()
    for number in range(40):
        turns.enter(f"busy {number}", share=Share("busy"), cost=10)
    for _ in range(20):
        _work_off(turns, 10)
    for number in range(20):
        turns.enter(f"late {number}", share=Share("late"), cost=10)
    had = Counter(str(_work_off(turns, 10)).split()[0] for _ in range(20))
    assert abs(had["busy"] - had["late"]) <= 1


def test_tenants_are_looked_through_seldom() -> None:
    """Else each new tenant would cost a search through all of them."""
    turns: Turns[int] = Turns()
    tenants = turns._tenants
    for number in range(60):
        turns.enter(number, share=Share(f"tenant {number}"), cost=1)
        if number:
            turns.leave(number)
    assert turns._tenants is tenants
    assert len(tenants) == 60


def test_who_comes_and_leaves_leaves_nothing_behind() -> None:
    turns: Turns[int] = Turns()
    turns.enter(-1, share=Share("stays"), cost=1)
    for number in range(10_000):
        turns.enter(number, share=Share(f"tenant {number}"), cost=1)
        turns.leave(number)
    assert len(turns._tenants) < 300
    assert len(turns._ready.heap) < 300
    assert turns.first == -1
    assert ("stays", "") in turns._tenants, "it is not forgotten what it has had"


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_more_than_if_all_went_on_at_once(seed: int) -> None:
    """An item ends at most one largest item and one quantum later than with equal rates.

    With exact clocks the bound would be the largest item alone; the scheduler learns of work by
    quanta.
    """
    for history in range(NUM_HISTORIES // 20):
        random_ = random.Random((seed << 16) + history)
        arrivals: dict[int, list[tuple[int, int]]] = {}
        for item in range(random_.randint(1, 12)):
            at = random_.randint(0, 60)
            arrivals.setdefault(at, []).append((item, random_.randint(1, 60)))
        ideal, ours = _at_once(arrivals), _by_turns(arrivals)
        largest = max(cost for each in arrivals.values() for _, cost in each)
        late = max(ours[item] - ideal[item] for item in ideal)
        assert late <= largest + QUANTUM, f"seed {seed}, history {history}"


def _work_off(turns: Turns[int] | Turns[str], work: int) -> object:
    item = turns.first
    assert item is not None
    turns.begin(item)  # type: ignore[arg-type]
    turns.charge(item, work)  # type: ignore[arg-type]
    turns.leave(item)  # type: ignore[arg-type]
    return item


def _by_turns(arrivals: dict[int, list[tuple[int, int]]]) -> dict[int, float]:
    turns: Turns[int] = Turns()
    left: dict[int, int] = {}
    ends: dict[int, float] = {}
    now = 0
    while left or any(at >= now for at in arrivals):
        for item, cost in arrivals.get(now, ()):
            turns.enter(item, share=NAMELESS, cost=cost)
            turns.begin(item)
            left[item] = cost
        now += 1
        if left:
            item = min(left, key=turns.rank)
            turns.charge(item, 1)
            left[item] -= 1
            if not left[item]:
                del left[item]
                turns.leave(item)
                ends[item] = now
    return ends


def _at_once(arrivals: dict[int, list[tuple[int, int]]]) -> dict[int, float]:
    """Return the time at which each item ends if all items are served at equal rates."""
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    now = 0.0
    while left or any(at >= now for at in arrivals):
        left |= dict(arrivals.get(int(now), ()))
        end = now + 1
        while left and now < end:
            span = min(min(left.values()) * len(left), end - now)
            share = span / len(left)
            now += span
            left = {item: each - share for item, each in left.items()}
            ends |= {item: now for item, each in left.items() if each <= 1e-9}
            left = {item: each for item, each in left.items() if each > 1e-9}
        now = end
    return ends
