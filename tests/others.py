"""Another user of the machine; a test that runs as root can become this user."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Final

import pytest

_NOBODY: Final = 65534
_fork = multiprocessing.get_context("fork")  # the user may not read our Python

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def another_user(work: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run ``work`` in a process without rights until the context ends.

    ``work`` gets one end of a pipe, and the context yields the other.
    """
    ours, theirs = _fork.Pipe()

    def become_nobody() -> None:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
        work(theirs)

    process = _fork.Process(target=become_nobody, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child needs no other thread
        process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()
