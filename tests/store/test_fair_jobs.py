"""Worker time is fair between tenants, requests, short jobs and long jobs."""

from __future__ import annotations

from collections import Counter

import pytest

from afferent.admission.shares import Share
from afferent.store.protocol import requests
from afferent.store.protocol.items import Queue
from afferent.store.protocol.results import Order, Outcome
from tests.store.pure_store import BAD, FEATURES, FRONTEND, SECOND, WORKER, Store

SHORT_US, LONG_US = 20_000, 1_500_000


class Jobs:
    """Submits jobs; the payload of each is the name of its request."""

    def __init__(self) -> None:
        self.store = Store(capacity_nbytes=16 << 20)
        self.number = 0

    def ask(self, request: str, number: int = 1, *, cost_us: int = SHORT_US) -> None:
        if "/" in request:
            share = Share(request.partition("/")[0])
            self.store.send(FRONTEND, requests.Introduce, request, share)
        items = []
        for _ in range(number):
            self.number += 1
            key = self.number.to_bytes(32, "big")
            items.append(Queue(key, FEATURES, 1000, [], request.encode(), cost_us))
        self.store.call(FRONTEND, requests.Acquire, request, items, returns=list[Outcome])

    def take(self, worker: int = WORKER) -> Order:
        return self.store.take(worker)

    def work(self, number: int, *, took_s: float = 0.02) -> list[str]:
        """Run so many jobs in a worker, and return the requests that they belong to."""
        done = []
        for _ in range(number):
            order = self.take()
            self.store.now_s += took_s
            self.store.finish(WORKER, order)
            done.append(order.payload.decode())
        return done


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def test_what_takes_a_quarter_of_a_second_is_short(jobs: Jobs) -> None:
    jobs.ask("a", 2, cost_us=250_000)
    jobs.ask("b", 1, cost_us=250_001)
    queue = jobs.store.state.flights.jobs
    assert (queue.num_queued, queue.num_ready) == (3, 2)


def test_one_image_is_not_behind_hundreds(jobs: Jobs) -> None:
    jobs.ask("many", 300)
    assert jobs.work(3) == ["many"] * 3
    jobs.ask("one")
    assert "one" in jobs.work(2)


def test_requests_with_as_much_work_take_turns(jobs: Jobs) -> None:
    for request in ("one", "other"):
        jobs.ask(request, 10)
    assert Counter(jobs.work(10)) == {"one": 5, "other": 5}


def test_tenants_have_equal_shares_however_many_requests_they_have(jobs: Jobs) -> None:
    for number in range(50):
        jobs.ask(f"flood/{number}", 2)
    jobs.ask("honest/1", 20)
    done = Counter(request.partition("/")[0] for request in jobs.work(20))
    assert abs(done["flood"] - done["honest"]) <= 1


def test_who_said_too_little_pays_for_what_it_took(jobs: Jobs) -> None:
    jobs.ask("liar/1", 40)
    jobs.ask("honest/1", 40)
    done: Counter[str] = Counter()
    for _ in range(33):
        order = jobs.take()
        whose = order.payload.decode().partition("/")[0]
        jobs.store.now_s += 0.2 if whose == "liar" else 0.02
        jobs.store.finish(WORKER, order)
        done[whose] += 1
    assert done["honest"] >= 9 * done["liar"]


def test_a_worker_is_left_for_short_jobs(jobs: Jobs) -> None:
    jobs.ask("short")
    assert jobs.work(1) == ["short"]
    jobs.ask("long", 4, cost_us=LONG_US)
    assert jobs.take().payload == b"long"
    waiting = jobs.store.send(SECOND, requests.Take)
    assert jobs.store.answer(SECOND, waiting) is None
    jobs.ask("short again")
    order = jobs.store.result(SECOND, waiting, Order)
    assert order.payload == b"short again"


def test_where_nobody_sends_short_jobs_long_ones_have_all_workers(jobs: Jobs) -> None:
    jobs.ask("long", 4, cost_us=LONG_US)
    assert jobs.take().payload == jobs.take(SECOND).payload == b"long"


def test_the_only_worker_does_long_jobs_too(jobs: Jobs) -> None:
    jobs.ask("short")
    jobs.ask("long", cost_us=LONG_US)
    assert sorted(jobs.work(2)) == ["long", "short"]


def test_a_long_job_is_next_as_soon_as_a_short_one_was_before_it(jobs: Jobs) -> None:
    """The long job is next even if the short job cost almost nothing."""
    jobs.ask("alone", 1, cost_us=1)
    assert jobs.work(1) == ["alone"]
    jobs.ask("short", 2, cost_us=1)
    jobs.ask("long", 2, cost_us=LONG_US)
    assert jobs.work(4) == ["long", "short", "short", "long"]


def test_short_jobs_do_not_keep_long_ones_from_all_workers(jobs: Jobs) -> None:
    jobs.ask("short", 100)
    jobs.ask("long", 2, cost_us=300_000)
    done = jobs.work(50)
    assert done.count("long") == 2


def test_a_job_whose_worker_died_is_next(jobs: Jobs) -> None:
    jobs.ask("first", cost_us=LONG_US)
    assert jobs.take().payload == b"first"
    jobs.ask("second", 3)
    jobs.store.die(WORKER)
    assert jobs.take(SECOND).payload == b"first"


def test_who_leaves_takes_its_jobs_along(jobs: Jobs) -> None:
    jobs.ask("leaves", 5)
    jobs.ask("stays")
    jobs.store.release(FRONTEND, "leaves")
    order = jobs.take()
    assert order.payload == b"stays"
    jobs.store.finish(WORKER, order, BAD)
    assert jobs.store.state.statistics().num_jobs_queued == 0


def test_whose_a_request_is_is_forgotten_with_it(jobs: Jobs) -> None:
    jobs.ask("acme/1")
    assert jobs.store.state._share_of((FRONTEND, "acme/1")) == Share("acme")
    jobs.store.release(FRONTEND, "acme/1")
    assert jobs.store.state._share_of((FRONTEND, "acme/1")) == Share()
    jobs.ask("acme/2")
    jobs.store.die(FRONTEND)
    assert jobs.store.state._share_of((FRONTEND, "acme/2")) == Share()


def test_time_of_a_worker_that_died_is_charged(jobs: Jobs) -> None:
    """A tenant whose item kills a worker after a long time waits for the others' jobs."""
    jobs.ask("bad/1", cost_us=SHORT_US)
    jobs.take(SECOND)
    jobs.store.now_s += 10.0
    jobs.store.die(SECOND)
    assert jobs.work(1) == ["bad/1"]
    jobs.ask("bad/2", 3)
    jobs.ask("good/1", 20)
    done = jobs.work(20)
    assert done.count("bad/2") <= 1, done
