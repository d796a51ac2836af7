"""Turns of the workers of one test run: some tests run alone on the machine.

- A test with the marker ``alone`` measures or overloads the machine. No other test of the run is
  executed meanwhile.
- The test with the marker ``first`` expects no other server on the machine. All other tests wait
  for its end, except those of ``quick.txt``, which start no server.

The workers share two lock files. A test locks ``room``: shared, or exclusively for one that runs
alone. A test that waits for ``room`` holds ``door``, so that later tests do not overtake it. It
keeps ``room`` for the next test if that one runs alone, too: the other workers wait once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import wait_until

_FIRST_TIMEOUT_S = 900.0
_QUICK = tuple((Path(__file__).parent / "quick.txt").read_text().split())
"""Folders and files of pure logic: no process, no server, no torch."""
_LONG = ("tests/test_docs_examples.py", "tests/test_wrong_settings.py", "tests/tier/test_node.py")
"""Long files whose names are late in the alphabet. They begin early: at the end of a run, one
worker would execute them while the others have no tests any more."""


def _folder() -> Path | None:
    """Return the folder of this run, the same in all of its workers; ``None`` without workers."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return None
    folder = Path(tempfile.gettempdir()) / f"afferent-tests-{run}"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a child of a test has inherited it


@functools.cache
def _has_first(session: pytest.Session) -> bool:
    return any(order(item) == 0 for item in session.items)


def order(item: pytest.Item) -> int:
    """Return 0 for the first test, 1 for tests that may run beside it, and more for all others."""
    if item.get_closest_marker("first") is not None:
        return 0
    if item.nodeid.startswith(_QUICK):
        return 1
    return 2 if item.nodeid.startswith(_LONG) else 3


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


_kept_room: list[contextlib.ExitStack] = []
"""The exclusive lock that the test before has kept for the next one; at most one."""


@contextlib.contextmanager
def turn(item: pytest.Item, following: pytest.Item | None) -> Iterator[None]:
    """Wait until a test may run, and have the others wait meanwhile, if they must.

    Args:
        following: The next test of this worker; ``None`` after the last one.
    """
    folder, number = _folder(), order(item)
    if folder is None:
        yield
        return
    over = folder / "first-is-over"
    if number >= 2 and _has_first(item.session):
        wait_until(over.exists, timeout_s=_FIRST_TIMEOUT_S)
    room = _kept_room.pop() if _kept_room else _enter(folder, is_alone=_is_alone(item))
    try:
        yield
    finally:
        if number == 0:
            over.touch()
        if _is_alone(item) and _is_alone(following):
            _kept_room.append(room)
        else:
            room.close()


def _enter(folder: Path, *, is_alone: bool) -> contextlib.ExitStack:
    """Wait for the lock of ``room``; the caller closes it."""
    room = contextlib.ExitStack()
    with _locked(folder / "door", fcntl.LOCK_EX):
        room.enter_context(_locked(folder / "room", fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH))
    return room
