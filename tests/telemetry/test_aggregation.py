"""Sums over processes never fall when a process ends, and count a reconnected process once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afferent.errors import AfferentError, FormatError, NotPermitted
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.telemetry import aggregation
from afferent.telemetry.aggregation import Aggregation
from afferent.telemetry.readings import MAX_METRICS, MAX_SERIES, Declaration, Reading, Series
from afferent.telemetry.registry import Registry
from afferent.types import MiB

ASKED = Declaration("asked_total", "counter", "Asked", ("outcome",))
NOW = Declaration("asked_now", "gauge", "Now")
WAITS = Declaration("wait_seconds", "histogram", "Waits", (), (0.001, 0.01, 1.0))


def counted(asked: float, now: float = 0.0, *waits_s: float) -> list[Reading]:
    registry = Registry()
    registry.counter(ASKED.name, ASKED.help, outcome=("ok",)).labels("ok").inc(asked)
    registry.gauge(NOW.name, NOW.help).labels().set(now)
    waits = registry.histogram(WAITS.name, WAITS.help, WAITS.buckets)
    for wait_s in waits_s:
        waits.labels().observe(wait_s)
    return registry.readings()


def total(sums: Aggregation, name: str = ASKED.name) -> list[float]:
    """Return the values of a metric with one series."""
    found = next(reading for reading in sums.total() if reading.metric.name == name)
    return found.series[0].values if found.series else []


def test_the_latest_of_each_process_is_added_up() -> None:
    sums = Aggregation()
    sums.push(1, 11, counted(1, 5))
    sums.push(2, 22, counted(10, 7, 0.0005, 0.002))
    sums.push(1, 11, counted(4, 2, 0.002, 500.0))
    assert total(sums) == [14]
    assert total(sums, NOW.name) == [9]
    *counts, seconds = total(sums, WAITS.name)
    assert counts == [1, 2, 0, 1]
    assert seconds == pytest.approx(500.0045)
    assert [reading.metric for reading in sums.total()] == [NOW, ASKED, WAITS]


def test_counts_of_the_dead_stay_and_their_gauges_go() -> None:
    sums = Aggregation()
    sums.push(1, 11, counted(3, 5))
    sums.lose(1)
    sums.lose(1)
    assert total(sums) == [3]
    assert total(sums, NOW.name) == [], "it is declared, and nobody says anything"


def test_a_process_that_comes_back_is_not_counted_twice() -> None:
    sums = Aggregation()
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
    """Processes come and go; the counts of those that ended first are merged."""
    sums = Aggregation()
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
    assert len(sums._gone) <= aggregation._MAX_GONE
    assert sum(total(sums, NOW.name)) == len(by_process.keys() - gone)


def test_a_client_is_one_process() -> None:
    """Else a client could fill the daemon's memory."""
    sums = Aggregation()
    sums.push(1, 11, counted(3))
    with pytest.raises(NotPermitted):
        sums.push(1, 12, counted(4))
    assert total(sums) == [3]


def one(metric: Declaration, *series: tuple[tuple[str, ...], list[float]]) -> list[Reading]:
    return [Reading(metric, [Series(words, values) for words, values in series])]


def declared(**changes: Any) -> list[Reading]:
    return [Reading(msgspec.structs.replace(ASKED, name="new_total", **changes), [])]


@pytest.mark.parametrize(
    "bad",
    [
        one(ASKED, (("ok", "more"), [1.0])),
        one(ASKED, (("ok",), [1.0, 2.0])),
        one(ASKED, (("ok",), [])),
        one(ASKED, (("ok",), [float("nan")])),
        one(WAITS, ((), [1.0])),
        one(msgspec.structs.replace(ASKED, kind="gauge")),
        one(msgspec.structs.replace(ASKED, labels=("code",))),
        one(msgspec.structs.replace(WAITS, buckets=(0.001, 0.01, 2.0))),
        [*one(NOW, ((), [1.0])), *one(NOW, ((), [1.0]))],
        declared(kind="gauge"),
        declared(labels=("a", "a")),
        declared(labels=("le",)),
        declared(labels=("a-b",)),
        declared(buckets=(1.0,)),
        one(Declaration('asked_total{x="', "counter", "")),
        one(Declaration("asked", "counter", "")),
        one(Declaration("wait_seconds_count", "gauge", "")),
        one(Declaration("new", "histogram", "")),
        one(Declaration("new", "histogram", "", (), (2.0, 1.0))),
        one(Declaration("new", "histogram", "", (), (float("inf"),))),
        one(ASKED, *[((f"{number}",), [1.0]) for number in range(MAX_SERIES + 1)]),
        [Reading(Declaration(f"m{number}", "gauge", ""), []) for number in range(MAX_METRICS + 1)],
    ],
)
def test_what_can_not_be_is_refused_and_nothing_of_it_kept(bad: Sequence[Reading]) -> None:
    sums = Aggregation()
    sums.push(1, 11, counted(3, 2, 0.5))
    before = sums.total()
    with pytest.raises(FormatError):
        sums.push(2, 22, [Reading(Declaration("other_total", "counter", ""), []), *bad])
    assert sums.total() == before


def test_metrics_of_all_processes_are_bounded() -> None:
    sums = Aggregation()
    names = iter(range(10**6))

    def new(number: int) -> list[Reading]:
        return [Reading(Declaration(f"m{next(names)}", "gauge", ""), []) for _ in range(number)]

    for client in range(aggregation._MAX_DECLARED // MAX_METRICS):
        sums.push(client, client, new(MAX_METRICS))
    with pytest.raises(NotPermitted):
        sums.push(99, 99, new(1))
    assert len(sums.total()) == aggregation._MAX_DECLARED


def test_what_the_dead_leave_behind_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of label values is limited; further values are counted as "other"."""
    monkeypatch.setattr(aggregation, "_MAX_GONE", 2)
    monkeypatch.setattr(aggregation, "_MAX_GONE_SERIES", 10)
    sums = Aggregation()
    for client in range(30):
        sums.push(client, client, one(ASKED, ((f"{client}",), [1.0]), (("ok",), [1.0])))
        sums.lose(client)
    (reading,) = sums.total()
    found = {series.labels: series.values for series in reading.series}
    assert found["ok",] == [30]
    assert found["other",] == [28 - 9]
    assert len(found) == 10 + 1 + 2
    assert sum(value for (value,) in found.values()) == 60


def test_over_a_daemon_and_through_its_death() -> None:
    """Living processes send all their counts to the next daemon; those of dead ones are lost."""

    async def main() -> None:
        with StoreServer(4 * MiB) as server:
            names = ("one", "two")
            one, two = [await AsyncDaemonStore.connect(server.address, name=n) for n in names]
            first, second = Registry(), Registry()
            asked = [each.counter(ASKED.name, ASKED.help) for each in (first, second)]
            asked[0].labels().inc(3)
            asked[1].labels().inc(4)
            await one.push_metrics(first.source, first.readings())
            await two.push_metrics(second.source, second.readings())

            async def requests() -> float:
                (reading,) = await one.read_metrics()
                assert reading.metric == asked[0].declaration
                return reading.series[0].values[0]

            assert await requests() == 7
            await two.close()
            assert await requests() == 7
            asked[0].labels().inc()
            psutil.Process(server.pid).kill()
            while True:
                try:
                    await one.push_metrics(first.source, first.readings())
                    break
                except AfferentError:
                    await asyncio.sleep(0.01)
            assert await requests() == 4
            await one.close()

    asyncio.run(main())
