"""Calls that hang are abandoned, and do not block later calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from afferent.errors import TierUnavailable
from afferent.tier.bounded_calls import MAX_LATE, BoundedCalls
from afferent.tier.folder_tier import FolderTier
from afferent.tier.protocol import Found, Value

NUM_THREADS = 2
NAME = "bounded-calls-test"


@pytest.fixture
def calls() -> Iterator[BoundedCalls]:
    calls = BoundedCalls(NUM_THREADS, name=NAME)
    yield calls
    calls.close()


@pytest.fixture
def is_over() -> Iterator[threading.Event]:
    """Yield an event; calls hang until it is set."""
    event = threading.Event()
    yield event
    event.set()


def soon(timeout_s: float = 20.0) -> float:
    return time.monotonic() + timeout_s


def num_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def hanging(calls: BoundedCalls, is_over: threading.Event) -> Future[None]:
    """Begin a call that hangs."""
    has_begun = threading.Event()

    def work() -> None:
        has_begun.set()
        is_over.wait()

    future = calls.submit(work)
    assert has_begun.wait(20.0)
    return future


def hang(calls: BoundedCalls, is_over: threading.Event, number: int) -> None:
    for _ in range(number):
        future = hanging(calls, is_over)
        with pytest.raises(TierUnavailable):
            calls.result(future, soon(0.001))


def test_result_returns_what_the_call_returns_or_raises(calls: BoundedCalls) -> None:
    assert calls.result(calls.submit(lambda: 7), soon()) == 7
    with pytest.raises(ZeroDivisionError):
        calls.result(calls.submit(lambda: 1 // 0), soon())


def test_result_after_calls_that_hang_is_in_time(
    calls: BoundedCalls, is_over: threading.Event
) -> None:
    """The threads of hanging calls are replaced."""
    hang(calls, is_over, 3 * NUM_THREADS)
    assert calls.result(calls.submit(lambda: 7), soon()) == 7


def test_threads_after_calls_that_hang_are_as_many_as_before(
    calls: BoundedCalls, is_over: threading.Event
) -> None:
    hang(calls, is_over, 3 * NUM_THREADS)
    assert num_threads() == 4 * NUM_THREADS
    is_over.set()
    until_s = soon()
    while num_threads() > NUM_THREADS:
        assert time.monotonic() < until_s
        calls.result(calls.submit(lambda: None), soon())
    assert calls.result(calls.submit(lambda: 7), soon()) == 7


def test_calls_that_hang_beyond_the_limit_take_no_more_threads(
    calls: BoundedCalls, is_over: threading.Event
) -> None:
    hang(calls, is_over, MAX_LATE + NUM_THREADS - 1)
    assert num_threads() == MAX_LATE + NUM_THREADS - 1
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            calls.result(calls.submit(lambda: 7), soon(0.001))
    assert num_threads() == MAX_LATE + NUM_THREADS - 1
    is_over.set()
    assert calls.result(calls.submit(lambda: 7), soon()) == 7


def test_folder_that_hung_is_used_again_though_its_calls_hang_still(
    is_over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls to an object store hang like this if its server disappears."""
    tier = FolderTier("memory://hung")
    value = Value(b"n" * 32, b"head", memoryview(b"body"))
    assert tier.put_many([value], ttl_s=60.0, deadline_s=soon()) == [True]

    def never(*_: object, **__: object) -> bytes:
        is_over.wait()
        return b""

    with monkeypatch.context() as hung:
        hung.setattr(MemoryFileSystem, "cat_file", never)
        for _ in range(12):
            with pytest.raises(TierUnavailable):
                tier.exists_many([value.name], deadline_s=soon(0.02))
    assert tier.exists_many([value.name], deadline_s=soon()) == [Found(b"head", 4)]
    tier.health(deadline_s=soon())
    tier.close()


def test_late_call_that_is_left_twice_gets_one_thread_in_its_place(
    calls: BoundedCalls, is_over: threading.Event
) -> None:
    """A batch leaves all its calls when one is late, so that each time a thread came for good."""
    for _ in range(5):
        future = hanging(calls, is_over)
        for _ in range(2):
            calls.leave(future)
    assert num_threads() == 5 + NUM_THREADS


def test_leave_of_a_call_that_has_not_begun_drops_it(
    calls: BoundedCalls, is_over: threading.Event
) -> None:
    has_run = threading.Event()
    waiting = [calls.submit(is_over.wait) for _ in range(NUM_THREADS)]
    calls.leave(calls.submit(has_run.set))
    is_over.set()
    for future in waiting:
        assert calls.result(future, soon())
    assert calls.result(calls.submit(lambda: 7), soon()) == 7
    assert not has_run.is_set()
