"""Processes of a server, started one by one by a benchmark."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from afferent.errors import ConfigError
from afferent.runtime.process import Child, LogSettings, Status, spawn

_LOG = LogSettings(level="warning", format="text")


@contextlib.contextmanager
def starting(
    name: str,
    module: str,
    settings: Struct,
    *,
    fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """A child, which is ended with the block; others can be started until `wait_ready`."""
    child = spawn(name, module, settings, log=_LOG, fds=fds, env=dict(env or {}))
    try:
        yield child
    finally:
        child.popen.terminate()
        child.popen.wait()
        child.close()


@contextlib.contextmanager
def running(
    name: str, module: str, settings: Struct, *, env: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """A child that has said that it is ready; raises as `wait_ready` does."""
    with starting(name, module, settings, env=env) as child:
        wait_ready(child)
        yield child


def wait_ready(child: Child) -> None:
    """Until it says so.

    Raises:
        ConfigError: It ended before.
    """
    os.set_blocking(child.status_fd, True)
    with open(child.status_fd, "rb", closefd=False) as lines:
        if any(msgspec.json.decode(line, type=Status).ready for line in lines):
            return
    raise ConfigError(f"the process {child.name!r} did not start; its log says why")
