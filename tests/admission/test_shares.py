"""The fair queue: bounds of the algorithm over random histories."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from afferent.admission.shares import NAMELESS, FairQueue, Share
from afferent.errors import StoreError

NUM_HISTORIES = 2_000
MAX_COST = 50


def test_one_request_at_a_time_is_in_order_of_arrival() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(100):
        queue.push(item, flow="a request", cost=1 + item % 7)
    assert [queue.pop() for _ in range(100)] == list(range(100))
    assert queue.pop() is None


def test_equal_requests_are_served_in_order_of_arrival() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(100):
        queue.push(item, flow=item, cost=3)
    assert [queue.pop() for _ in range(100)] == list(range(100))


def test_a_small_request_is_not_behind_all_items_of_a_large_one() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push(f"large {number}", flow="large", cost=100)
    assert queue.pop() == "large 0"
    queue.push("small", flow="small", cost=5)
    assert queue.pop() == "small"


def test_request_with_few_items_is_before_requests_with_many() -> None:
    """Twenty requests of eight images each are queued: a single image waits for none of them."""
    queue: FairQueue[str] = FairQueue()
    for number in range(160):
        queue.push(f"many {number}", flow=number % 20, cost=3)
    for number in range(7):
        queue.push(f"few {number}", flow=f"few {number}", cost=3)
        assert queue.pop() == f"few {number}"
        queue.pop()


def test_request_with_many_items_is_served_though_small_ones_never_stop() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"many {number}", flow="many", cost=1)
    served: Counter[str] = Counter()
    while served["many"] < 100:
        if "few" not in queue:
            queue.push("few", flow=object(), cost=1)
        served[(queue.pop() or "").split()[0]] += 1
    assert served["few"] <= 100 * 8, "each of its items waits for eight of others at the most"


def test_a_large_item_waits_for_no_more_small_ones_than_its_own_work() -> None:
    """No item starves, however many requests arrive."""
    queue: FairQueue[object] = FairQueue()
    queue.push("large", flow="large", cost=1000)
    served = 0
    while True:
        queue.push(object(), flow=object(), cost=10)
        if queue.pop() == "large":
            break
        served += 10
    assert served <= 1000 + 10


def test_places_are_left_for_tenants_that_come_later() -> None:
    """A tenant that fills the queue leaves as many places free as it takes."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    taken = []
    for name in ("one", "two", "three"):
        number = 0
        while queue.has_place(Share(name), 96):
            queue.push((name, number), share=Share(name), flow=number, cost=1)
            number += 1
        taken.append(number)
    assert taken == [48, 24, 12]
    while queue.pop() is not None:
        pass
    queue.validate()
    assert queue.has_place(Share("one"), 96)


def test_tenants_share_by_weight() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    shares = {"one": Share("one", 1.0), "three": Share("three", 3.0)}
    for name, share in shares.items():
        for number in range(1000):
            queue.push((name, number), share=share, flow=(name, number % 17), cost=10)
    served = Counter((queue.pop() or ("", 0))[0] for _ in range(400))
    assert served["three"] == pytest.approx(300, abs=2)


def test_many_requests_are_no_larger_share() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(500):
        queue.push(("flood", number), share=Share("flood"), flow=number, cost=1)
    for number in range(50):
        queue.push(("honest", number), share=Share("honest"), flow=0, cost=1)
    served = Counter((queue.pop() or ("", 0))[0] for _ in range(100))
    assert served["honest"] == 50


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue()
    busy, idle = Share("busy"), Share("idle")
    queue.push(-1, share=idle, flow=0, cost=1)
    assert queue.pop() == -1
    for number in range(100):
        queue.push(number, share=busy, flow=0, cost=1)
        queue.pop()
    for number in range(100, 120):
        queue.push(number, share=busy, flow=0, cost=1)
        queue.push(number + 1000, share=idle, flow=0, cost=1)
    first = [queue.pop() or 0 for _ in range(10)]
    assert sum(item > 1000 for item in first) in (4, 5, 6)


def test_work_is_charged_as_it_was() -> None:
    """Two tenants declare the same cost; the one that takes ten times as long gets a tenth."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for name in ("liar", "honest"):
        for number in range(1000):
            queue.push((name, number), share=Share(name), flow=name, cost=1)
    served: Counter[str] = Counter()
    for _ in range(440):
        name, _ = queue.pop() or ("", 0)
        served[name] += 1
        if name == "liar":
            queue.charge(Share(name), 9)
    assert served["liar"] == pytest.approx(40, abs=2)


def test_what_took_less_is_given_back_but_not_saved_up() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    one, other = Share("one"), Share("other")
    queue.push(("one", 0), share=one, flow=0, cost=100)
    assert queue.pop() == ("one", 0)
    queue.charge(one, -99)
    for number in range(1, 40):
        queue.push(("one", number), share=one, flow=0, cost=1)
        queue.push(("other", number), share=other, flow=0, cost=1)
    queue.pop()
    queue.charge(one, -1000)  # while others are queued
    queue.validate()
    served = Counter((queue.pop() or ("", 0))[0] for _ in range(20))
    assert served["one"] == pytest.approx(10, abs=1)


def test_who_leaves_costs_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10):
        queue.push(number, flow="left", cost=1000)
    queue.push(10, flow="stays", cost=5000)
    for number in range(9):
        assert queue.discard(number)
    assert not queue.discard(0)
    assert 9 in queue
    assert 0 not in queue
    assert list(queue) == [9, 10]
    assert [queue.pop(), queue.pop()] == [9, 10]


def test_who_comes_and_leaves_while_nobody_is_served_leaves_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push(-1, flow="waits", cost=1)
    for number in range(10_000):
        queue.push(number, flow=number, cost=1 + number % 3)
        assert queue.discard(number)
        queue.push(number, share=Share("other"), flow=number, cost=1)
        assert queue.discard(number)
    heaps = (queue._ready.heap, *(tenant.ready.heap for tenant in queue._tenants.values()))
    assert sum(map(len, heaps)) < 400
    assert queue.pop() == -1


def test_a_tenant_that_asks_for_more_keeps_its_place() -> None:
    queue: FairQueue[str] = FairQueue()
    for item, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        queue.push(item, share=Share(tenant), flow=item, cost=1)
    assert [queue.pop() for _ in range(3)] == ["a1", "b1", "a2"]


def test_an_item_waits_once() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.push(1, flow=1, cost=1)
    with pytest.raises(StoreError, match="waits once"):
        queue.push(1, flow=2, cost=1)


def test_tenants_are_looked_through_seldom() -> None:
    """Else each new tenant would cost a search through all of them."""
    queue: FairQueue[int] = FairQueue()
    tenants = queue._tenants
    for number in range(60):
        queue.push(number, share=Share(str(number)), flow=0, cost=1)
        if number:
            queue.discard(number)
    assert queue._tenants is tenants
    assert len(tenants) == 60


def test_tenants_that_have_gone_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10_000):
        queue.push(number, share=Share(str(number)), flow=0, cost=1)
        queue.pop()
    assert len(queue._tenants) < 200
    for number in range(3):  # tenants that always have work
        queue.push(-1 - number, share=Share(f"stays {number}", weight=1e-6), flow=0, cost=1)
    for number in range(10_000):
        queue.push(number, share=Share(str(number)), flow=0, cost=1)
        queue.discard(number)
    assert len(queue._tenants) < 200
    queue.validate()
    assert {(f"stays {number}", "") for number in range(3)} <= set(queue._tenants)


def history(seed: int) -> None:
    """Check the fairness of a random history.

    Tenants that always have work get it by weight, within one item of each. This is the bound of
    start-time fair queueing. All other tenants come and go.
    """
    rng = random.Random(seed)
    queue: FairQueue[int] = FairQueue()
    tenants = [
        Share(f"tenant {number}", rng.choice((0.5, 1.0, 1.0, 2.0, 5.0)))
        for number in range(rng.randint(2, 5))
    ]
    costs: dict[int, tuple[Share, int]] = {}
    waiting: Counter[str] = Counter()
    work = dict.fromkeys((share.tenant for share in tenants), 0.0)
    always = tenants[:2]

    def push(share: Share) -> None:
        item, cost = len(costs), rng.randint(1, MAX_COST)
        costs[item] = (share, cost)
        queue.push(item, share=share, flow=(share.tenant, rng.randrange(4)), cost=cost)
        waiting[share.tenant] += 1

    for _ in range(rng.randint(20, 60)):
        for share in always:
            while waiting[share.tenant] < 2:
                push(share)
        step = rng.random()
        if step < 0.4:
            push(rng.choice(tenants))
        elif step < 0.5:
            item = rng.choice(list(queue))
            share, _ = costs[item]
            if waiting[share.tenant] > 1:
                assert queue.discard(item)
                waiting[share.tenant] -= 1
        else:
            ahead, popped = queue.peek(), queue.pop()
            assert popped is not None
            assert popped == ahead
            share, cost = costs[popped]
            waiting[share.tenant] -= 1
            work[share.tenant] += cost / share.weight
        queue.validate()
    one, other = always
    assert abs(work[one.tenant] - work[other.tenant]) <= (
        MAX_COST / one.weight + MAX_COST / other.weight
    ), seed


def test_shares_over_random_histories() -> None:
    for seed in range(NUM_HISTORIES):
        history(seed)


def test_a_share_has_a_weight() -> None:
    assert Share("", 1.0) == NAMELESS
