"""The messages to the store when media handles arrive in a process of vLLM."""

from __future__ import annotations

from afferent.engines.references import Of
from afferent.engines.vllm.plugin.arrivals import Arrivals, Step


def test_the_first_and_the_last_of_a_request_are_told() -> None:
    arrivals = Arrivals()
    steps = [arrivals.note(Of("r", index, 4)) for index in (2, 0, 3, 1)]
    assert steps == [Step.ASK, Step.NOTHING, Step.NOTHING, Step.LAST]


def test_one_alone_is_the_last_and_is_asked_for_each_time() -> None:
    arrivals = Arrivals()
    assert [arrivals.note(Of("r", 0, 1)) for _ in range(3)] == [Step.LAST] * 3


def test_one_that_comes_again_is_asked_for() -> None:
    arrivals = Arrivals()
    assert [arrivals.note(Of("r", 1, 3)) for _ in range(2)] == [Step.ASK] * 2
    assert arrivals.note(Of("other", 0, 2)) is Step.ASK


def test_no_more_than_so_many_requests_are_remembered() -> None:
    arrivals = Arrivals()
    for number in range(10_000):
        assert arrivals.note(Of(str(number), 0, 2)) is Step.ASK
    assert len(arrivals._seen) == 4096
    assert arrivals.note(Of("9999", 1, 2)) is Step.LAST
    assert arrivals.note(Of("0", 1, 2)) is Step.ASK
