"""The registry: each metric is declared once, with limited label values, and is pushed as it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from afferent.errors import AfferentError, FormatError, StoreUnavailable
from afferent.telemetry import pushing
from afferent.telemetry.pushing import push_counts
from afferent.telemetry.readings import Reading, Series
from afferent.telemetry.registry import REGISTRY, Registry
from afferent.types import decode, encode


def numbers(registry: Registry) -> dict[tuple[str, ...], list[float]]:
    """Return the values by the metric's name and the label values."""
    return {
        (reading.metric.name, *series.labels): series.values
        for reading in registry.readings()
        for series in reading.series
    }


def test_what_is_not_a_word_of_ours_is_other() -> None:
    registry = Registry()
    asked = registry.counter("asked_total", "Asked", api=("chat",), outcome=("ok", "failed"))
    for hostile in ("http://169.254.169.254/", "f" * 64, 'a"b\nc', ""):
        asked.labels("chat", hostile).inc()
    assert numbers(registry) == {("asked_total", "chat", "other"): [4.0]}
    for words in (("chat",), ("chat", "ok", "more")):
        with pytest.raises(ValueError, match="argument"):
            asked.labels(*words)


def test_words_may_come_later() -> None:
    words: set[str] = set()
    registry = Registry()
    asked = registry.counter("asked_total", "Asked", api=words)
    asked.labels("chat").inc()
    words.add("chat")
    asked.labels("chat").inc(2)
    expected = {("asked_total", "other"): [1.0], ("asked_total", "chat"): [2.0]}
    assert numbers(registry) == expected


def zero_series(registry: Registry) -> list[tuple[str, ...]]:
    assert all(not any(each.values) for zero in registry.zeros() for each in zero.series)
    return [(zero.metric.name, *each.labels) for zero in registry.zeros() for each in zero.series]


def test_zeros_has_every_word_of_a_counter() -> None:
    words = {"b", "a"}
    registry = Registry()
    registry.counter("asked_total", "Asked", api=words, outcome=("ok", "failed"))
    registry.gauge("now", "Now", kind=("a",))
    assert zero_series(registry) == [
        ("asked_total", api, outcome) for api in "ab" for outcome in ("ok", "failed")
    ]
    words.add("c")
    assert ("asked_total", "c", "ok") in zero_series(registry)


def test_zeros_of_very_many_words_has_the_first_of_the_last_label() -> None:
    many, few = tuple(map(str, range(400))), ("x", "y")
    registry = Registry()
    registry.counter("asked_total", "Asked", api=many, outcome=few)
    assert zero_series(registry) == [("asked_total", api, "x") for api in many]


def test_zeros_of_words_that_are_on_no_list_is_empty() -> None:
    class Any:
        def __contains__(self, _: object) -> bool:
            return True

    registry = Registry()
    registry.counter("asked_total", "Asked", api=Any())
    assert zero_series(registry) == []


def test_begin_at_zero_keeps_what_was_counted() -> None:
    registry = Registry()
    asked = registry.counter("asked_total", "Asked", api=("a", "b"))
    asked.labels("a").inc()
    registry.begin_at_zero()
    assert numbers(registry) == {("asked_total", "a"): [1.0], ("asked_total", "b"): [0.0]}


def test_a_histogram_counts_up_to_its_bounds() -> None:
    registry = Registry()
    waits = registry.histogram("wait_seconds", "Waits", (0.001, 1.0))
    for seconds in (0.0, 0.001, 0.0011):
        waits.labels().observe(seconds)
    waits.labels().observe(2.0, times=3)
    assert numbers(registry) == {("wait_seconds",): [2.0, 1.0, 3.0, pytest.approx(6.0021)]}


def test_what_another_process_counts_is_read_and_not_pushed() -> None:
    registry = Registry()
    hits = registry.observed("counter", "hits_total", "Hits", lambda its: its["hits"])
    objects = registry.observed("gauge", "objects", "Objects", len, kind=("raw", "features"))
    assert hits.reading({"hits": 3}).series == [Series((), [3.0])]
    by_kind = objects.reading_by({"raw": "ab", "new": "abc", "newer": "d"})
    assert by_kind.series == [Series(("raw",), [2.0]), Series(("other",), [4.0])]
    assert registry.readings() == []
    assert [each.name for each in registry.declarations] == ["hits_total", "objects"]


@pytest.mark.parametrize(
    ("name", "labels"),
    [("hits_total", {}), ("hits", {}), ("Hits_total", {}), ("more_total", {"le": ("1",)})],
    ids=["again", "no total", "case", "label"],
)
def test_what_can_not_be_declared(name: str, labels: dict[str, Any]) -> None:
    registry = Registry()
    registry.counter("hits_total", "Hits")
    with pytest.raises(ValueError, match=f"^{name}: "):
        registry.counter(name, "Hits", **labels)
    with pytest.raises(ValueError, match="grow"):
        registry.histogram("seconds", "Seconds", (1.0, 0.5))
    assert [each.name for each in registry.declarations] == ["hits_total"]


def test_readings_are_the_same_on_the_other_side() -> None:
    registry = Registry()
    registry.counter("asked_total", "Asked", api=("chat",)).labels("chat").inc()
    registry.histogram("wait_seconds", "Waits", (0.5, 1.0)).labels().observe(0.7)
    decoder = msgspec.msgpack.Decoder(list[Reading])
    assert decode(decoder, encode(registry.readings())) == registry.readings()


def test_a_forked_child_is_another_process() -> None:
    gauge = REGISTRY.gauge("afferent_test_now", "Of this test alone")
    try:
        gauge.labels().set(7)
        source = REGISTRY.source
        pid = os.fork()
        if pid == 0:
            is_new = REGISTRY.source != source and gauge.labels().values == [0.0]
            os._exit(0 if is_new else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (REGISTRY.source, gauge.labels().values) == (source, [7.0])
    finally:
        REGISTRY._counted.remove(gauge)
        del REGISTRY._declared["afferent_test_now"]


class Daemon:
    """A daemon that answers each push as scripted, and disconnects after the last."""

    def __init__(self, *answers: AfferentError | None) -> None:
        self._answers = list(answers)
        self.pushed: list[tuple[int, Sequence[Reading]]] = []
        self.is_over = asyncio.Event()

    @property
    def is_open(self) -> bool:
        if not self._answers:
            self.is_over.set()
        return bool(self._answers)

    async def push_metrics(self, source: int, readings: Sequence[Reading]) -> None:
        self.pushed.append((source, readings))
        if (error := self._answers.pop(0)) is not None:
            raise error


def test_counts_are_pushed_whatever_was_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pushing, "PERIOD_S", 0.001)
    registry = Registry()
    registry.counter("asked_total", "Asked").labels().inc()
    refused = FormatError("a metric is not as it was declared")
    answers = [None, StoreUnavailable("gone"), refused, refused, None, refused]

    async def main() -> Daemon:
        daemon = Daemon(*answers)
        task = asyncio.create_task(push_counts(daemon, registry))
        await daemon.is_over.wait()
        task.cancel()
        return daemon

    daemon = asyncio.run(main())
    assert daemon.pushed == [(registry.source, registry.readings())] * len(answers)
    assert [record.message for record in caplog.records] == ["counts were refused"] * 2
