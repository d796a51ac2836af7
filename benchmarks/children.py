"""Processes of a server that a benchmark starts one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from afferent.errors import ConfigError
from afferent.runtime.process import Child, LogSettings, Status, spawn

_END_TIMEOUT_S, _START_TIMEOUT_S = 20.0, 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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
    """Start a child and end it with the block; others can be started before `wait_ready`."""
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
    """Run a child; wait until it is ready, and raise as `wait_ready` does."""
    with starting(name, module, settings, env=env) as child:
        wait_ready(child)
        yield child


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[int, list[psutil.Process]]]:
    """Run a server of the built-in model; yield its port and its processes."""
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", "shapes", "--port", str(port)]
    with command([*line, *arguments, "--log-level", "error"]) as popen:
        url = f"http://127.0.0.1:{port}/ready"
        wait_until_it_answers(popen, url, timeout_s=_START_TIMEOUT_S, log="its log is above")
        yield port, psutil.Process(popen.pid).children(recursive=True)


def wait_ready(child: Child) -> None:
    """Wait until the child reports to be ready.

    Raises:
        ConfigError: It ended before.
    """
    os.set_blocking(child.status_fd, True)
    with open(child.status_fd, "rb", closefd=False) as lines:
        if any(msgspec.json.decode(line, type=Status).ready for line in lines):
            return
    raise ConfigError(f"the process {child.name!r} did not start; its log says why")


@contextlib.contextmanager
def command(
    line: Sequence[str], *, env: Mapping[str, str] | None = None, **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program; end it with the block, and all processes that it has started.

    Args:
        streams: ``stdout`` and ``stderr`` for `subprocess.Popen`.
    """
    popen = subprocess.Popen(
        line, env={**os.environ, **(env or {})}, start_new_session=True, **streams
    )
    try:
        yield popen
    finally:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(_END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()


def wait_until_it_answers(
    popen: subprocess.Popen[bytes], url: str, *, timeout_s: float, log: str
) -> None:
    """Wait until the server answers with 200.

    Args:
        log: The end of the error message, which says where the log is.
    """
    deadline_s = time.monotonic() + timeout_s
    while popen.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - ours
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"a server did not start; {log}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (float(fields[11]) + float(fields[12])) / _TICKS_PER_S
