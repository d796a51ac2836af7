"""Sums over processes: they don't fall when one goes, and count none twice when it comes back."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afferent.errors import AfferentError, FormatError, NotPermitted
from afferent.metrics import Metrics
from afferent.series import Sample
from afferent.store import tallies
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.server import StoreServer
from afferent.store.tallies import Tallies
from afferent.types import MiB

OK = ("openai_chat", "ok")


def counted(requests: float, in_flight: float = 0.0, *waits_s: float) -> list[Sample]:
    metrics = Metrics()
    metrics.requests.labels(*OK).inc(requests)
    metrics.in_flight.set(in_flight)
    for wait_s in waits_s:
        metrics.admission_seconds.observe(wait_s)
    return metrics.samples()


def total(sums: Tallies, name: str = "afferent_requests_total") -> list[float]:
    return next((sample.values for sample in sums.total() if sample.name == name), [0.0])


def test_the_latest_of_each_process_is_added_up() -> None:
    sums = Tallies()
    sums.push(1, 11, counted(1, 5))
    sums.push(2, 22, counted(10, 7, 0.0005, 0.002))
    sums.push(1, 11, counted(4, 2, 0.002, 500.0))
    assert total(sums) == [14]
    assert total(sums, "afferent_requests_in_flight") == [9]
    *counts, seconds = total(sums, "afferent_admission_seconds")
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (1, 2, 1, 4)
    assert seconds == pytest.approx(500.0045)


def test_counts_of_the_dead_stay_and_their_gauges_go() -> None:
    sums = Tallies()
    sums.push(1, 11, counted(3, 5))
    sums.lose(1)
    sums.lose(1)
    assert total(sums) == [3]
    assert total(sums, "afferent_requests_in_flight") == [0]


def test_a_process_that_comes_back_is_not_counted_twice() -> None:
    sums = Tallies()
    sums.push(1, 11, counted(3))
    sums.push(5, 11, counted(4))
    sums.lose(1)
    assert total(sums) == [4]
    sums.lose(5)
    sums.push(6, 11, counted(6))
    assert total(sums) == [6]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 9), st.booleans()), min_size=1, max_size=400
    )
)
def test_sums_never_fall_and_never_count_twice(events: list[tuple[int, int, bool]]) -> None:
    """However many processes come and go; the oldest of the dead are kept as one number."""
    sums = Tallies()
    by_process: dict[int, int] = {}
    gone: set[int] = set()
    before = 0.0
    for process, more, dies in events:
        if process not in gone:
            by_process[process] = by_process.get(process, 0) + more
            sums.push(process, process, counted(by_process[process], 1))
            if dies:
                gone.add(process)
                sums.lose(process)
        (now,) = total(sums)
        assert before <= now == sum(by_process.values())
        before = now
    assert len(sums._gone) <= tallies._MAX_GONE
    assert total(sums, "afferent_requests_in_flight") == [len(by_process.keys() - gone)]


def test_a_client_is_one_process() -> None:
    """Or it could have the daemon remember any number of them."""
    sums = Tallies()
    sums.push(1, 11, counted(3))
    with pytest.raises(NotPermitted):
        sums.push(1, 12, counted(4))
    assert total(sums) == [3]


@pytest.mark.parametrize(
    "bad",
    [
        Sample("nobody_knows", [], [1.0]),
        Sample("afferent_requests_total", ["http://host/secret", "ok"], [1.0]),
        Sample("afferent_requests_total", ["openai_chat"], [1.0]),
        Sample("afferent_requests_in_flight", [], [1.0, 2.0]),
        Sample("afferent_admission_seconds", [], [1.0]),
    ],
    ids=["name", "word", "labels", "values", "buckets"],
)
def test_only_what_is_in_the_registry_is_taken(bad: Sample) -> None:
    sums = Tallies()
    with pytest.raises(FormatError):
        sums.push(1, 11, [bad])
    assert sums.total() == []


def test_over_a_daemon_and_through_its_death() -> None:
    """What lives tells the next daemon all that it has counted; what had died is forgotten."""

    async def main() -> None:
        with StoreServer(4 * MiB) as server:
            names = ("one", "two")
            one, two = [await AsyncDaemonStore.connect(server.address, name=n) for n in names]
            of_one, of_two = Metrics(), Metrics()
            of_one.requests.labels(*OK).inc(3)
            of_two.requests.labels(*OK).inc(4)
            await one.push(of_one.source, of_one.samples())
            await two.push(of_two.source, of_two.samples())

            async def requests() -> float:
                found = {sample.name: sample for sample in await one.figures()}
                return found["afferent_requests_total"].values[0]

            assert await requests() == 7
            await two.close()
            assert await requests() == 7
            of_one.requests.labels(*OK).inc()
            psutil.Process(server.pid).kill()
            while True:
                try:
                    await one.push(of_one.source, of_one.samples())
                    break
                except AfferentError:
                    await asyncio.sleep(0.01)
            assert await requests() == 4
            await one.close()

    asyncio.run(main())
