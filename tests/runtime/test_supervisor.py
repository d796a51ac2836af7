"""A supervisor with a short lack of descriptors or memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from msgspec import Struct

from afferent.config import ServeConfig
from afferent.operations.supervisor.parts import Part
from afferent.operations.supervisor.supervisor import Supervisor
from tests.waiting import until


class Nothing(Struct):
    pass


def fds() -> set[str]:
    return {each.name for each in Path("/proc/self/fd").iterdir()}


def test_report_that_is_none_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """A compromised process may write anything to the supervisor."""
    supervisor: Any = Supervisor(SimpleNamespace(config=ServeConfig()))  # type: ignore[arg-type]
    part = Part("sleeper", "tests.runtime.sleeper", Nothing)
    supervisor._parts["sleeper"] = part
    ours, theirs = os.pipe()
    bad = [
        b"\xff\xff",
        b'{"ready": 1}',
        b'{"ready": true, "text": "\xff"}',
        b'{"x": ' + b"[" * 50_000,
    ]
    os.write(theirs, b"\n".join([*bad, b'{"ready": true, "text": "here"}\n']))
    supervisor._on_status(part, SimpleNamespace(status_fd=ours))
    assert part.is_ready
    assert caplog.text.count("a report of a child is none") == len(bad)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("nth", [1, 2])
def test_of_a_process_that_can_not_be_heard_nothing_is_left(nth: int) -> None:
    """Its death would not be noticed, so it would never be replaced."""

    async def run() -> None:
        supervisor: Any = Supervisor(SimpleNamespace(config=ServeConfig()))  # type: ignore[arg-type]
        part = Part("sleeper", "tests.runtime.sleeper", Nothing)
        loop = asyncio.get_running_loop()
        real, calls = loop.add_reader, []

        def add_reader(*args: Any) -> None:
            calls.append(args)
            if len(calls) == nth:
                raise OSError(12, "Cannot allocate memory")
            real(*args)

        loop.add_reader = add_reader  # type: ignore[method-assign]
        before, others = fds(), psutil.Process().children()
        with pytest.raises(OSError, match="Cannot allocate memory"):
            supervisor._start(part)
        assert part.child is None
        assert fds() <= before
        assert set(psutil.Process().children()) <= set(others)
        supervisor._start_again(part, "test")
        await until(lambda: part.child is not None)
        first = part.child
        assert first is not None
        first.popen.kill()
        await until(lambda: part.child not in (None, first))
        supervisor._stop.set()
        supervisor._kill(part)
        await until(lambda: part.child is None)
        assert fds() <= before

    asyncio.run(run())


ENDS_WHILE_IT_PREPARES = """
import os, signal
from types import SimpleNamespace
from afferent.config import ServeConfig
from afferent.operations.supervisor.supervisor import Supervisor
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Supervisor._prepare = lambda self, owned: os.kill(os.getpid(), signal.SIGTERM)
Supervisor(SimpleNamespace(config=ServeConfig())).run()
"""


def test_first_process_of_a_container_ends_while_it_prepares() -> None:
    """The kernel ignores a signal that such a process does not handle."""
    done = subprocess.run([sys.executable, "-c", ENDS_WHILE_IT_PREPARES], check=False, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
