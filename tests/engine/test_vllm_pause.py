"""The pause after lookups of embeddings that the store did not answer in time."""

from __future__ import annotations

import pytest

from afferent.engines.vllm.plugin.pause import LONGEST_S, Pause


def test_there_is_none_at_first() -> None:
    assert Pause().is_over(0.0)


def test_one_late_answer_costs_as_much_time_again() -> None:
    pause = Pause()
    pause.begin(10.0, waited_s=0.25)
    assert not pause.is_over(10.24)
    assert pause.is_over(10.25)


def test_an_answer_makes_the_next_pause_short_again() -> None:
    pause = Pause()
    pause.begin(10.0, waited_s=0.25)
    pause.begin(11.0, waited_s=0.25)
    assert not pause.is_over(11.49)
    pause.end()
    pause.begin(20.0, waited_s=0.25)
    assert pause.is_over(20.25)


def test_a_store_that_hangs_is_asked_rarely() -> None:
    pause, now_s, waited_s, calls = Pause(), 0.0, 0.0, 0
    while now_s < 600.0:
        if pause.is_over(now_s):
            now_s, waited_s, calls = now_s + 0.25, waited_s + 0.25, calls + 1
            pause.begin(now_s, waited_s=0.25)
        now_s += 0.01
    assert waited_s / 600.0 < 0.06
    assert calls == pytest.approx(600.0 / (LONGEST_S + 0.25), abs=8)
