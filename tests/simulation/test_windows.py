"""Each process dies, or is stopped, before each of its system calls."""

from __future__ import annotations

import pytest

from tests.simulation.ablations import ABLATIONS
from tests.simulation.running import stage
from tests.simulation.windows import run_window, small_plan, windows

CLIENTS = ("lib-0", "front-0", "work-0")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CLIENTS)
def test_each_call_of_a_client(name: str) -> None:
    plan = small_plan()
    with stage():
        for window in windows(plan, (name,), ("crash", "pause")):
            violation, _ = run_window(plan, window)
            assert not violation, (window, violation)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["crash", "pause", *CLIENTS])
def test_each_call_of_the_daemon(what: str) -> None:
    """It dies, it is stopped for a while, or a client dies while it is stopped."""
    plan = small_plan()
    with stage():
        for window in windows(plan, ("daemon",), (what,)):
            violation, _ = run_window(plan, window)
            assert not violation, (window, violation)


@pytest.mark.timeout(300)
def test_a_client_that_dies_between_its_welcome_and_its_connection_is_noticed() -> None:
    """None of the first 2,000 seeds strikes between these two calls."""
    plan = small_plan()
    lost = next(each for each in ABLATIONS if each.name == "lost-clients")
    with stage(), lost.applied():
        found = (run_window(plan, window)[0] for window in windows(plan, ("daemon",), ("lib-0",)))
        assert any(found)


def test_all_processes_make_calls_and_the_plan_is_carried_out() -> None:
    with stage():
        violation, calls = run_window(small_plan(), None)
    assert not violation
    assert calls.keys() == {"daemon", *CLIENTS}
    assert min(calls.values()) > 20
