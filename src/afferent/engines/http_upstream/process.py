"""Parent process of one upstream: starts it, reports when it answers, and ends with it.

python -m afferent.engines.http_upstream.process FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from afferent.engines.http_upstream.health import ServerWatch, answers
from afferent.engines.http_upstream.launch import ServerProcess
from afferent.engines.http_upstream.leftovers import Leftovers
from afferent.runtime import logs
from afferent.runtime.process import ChildProcess, die_with_parent
from afferent.runtime.sockets import MAX_PATH_NBYTES, own_folder

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2
_WATCH_S = 1.0
_LOOK_TIMEOUT_S = 1.0
"""Together with `_WATCH_S`, less than the liveness timeout."""
_TERMINATE_TIMEOUT_S = 4.0
_KILLED_TIMEOUT_S = 2.0
_NOTE_S = 2.0
_SOCKET_NBYTES = len("/") + 36
"""Longest name of a socket of the server's own: a UUID."""


@contextmanager
def started(settings: ServerProcess) -> Iterator[tuple[subprocess.Popen[bytes], Leftovers]]:
    """Run a server in a session of its own, and end the whole session at the end."""
    path, parent_pid = Path(settings.socket_path), os.getpid()
    is_json = isinstance(sys.stderr, logs.JsonLines)
    path.unlink(missing_ok=True)
    server = subprocess.Popen(
        settings.command,
        env={**_sockets(settings), **os.environ},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent_pid),
        stdout=subprocess.PIPE if is_json else None,
        stderr=subprocess.STDOUT if is_json else None,
    )
    if server.stdout is not None:
        output = io.TextIOWrapper(server.stdout, encoding="utf-8", errors="replace")
        forwarded = (output, settings.process_name)
        threading.Thread(target=_forward, args=forwarded, name="output", daemon=True).start()
    leftovers = Leftovers(server.pid)
    try:
        yield server, leftovers
    finally:
        leftovers.look()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        path.unlink(missing_ok=True)
        leftovers.await_end(_KILLED_TIMEOUT_S)
        leftovers.remove()


def _forward(output: io.TextIOWrapper, process_name: str) -> None:
    """Print the server's output as events, until all of its processes have ended."""
    with output:
        logs.forward(output, process=process_name)


def _sockets(settings: ServerProcess) -> dict[str, str]:
    """Return the environment that places the server's own sockets in this process's folder."""
    folder = str(own_folder())
    if len(folder) + _SOCKET_NBYTES > MAX_PATH_NBYTES:
        return {}
    return dict.fromkeys(settings.folder_variables, folder)


async def _run(
    child: ChildProcess,
    settings: ServerProcess,
    server: subprocess.Popen[bytes],
    leftovers: Leftovers,
) -> int:
    """Run until the server ends, which is an error, or until it hangs, or until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping, ended = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    pidfd = os.pidfd_open(server.pid)
    loop.add_reader(pidfd, ended.set)
    child.report(f"starting {settings.title} (it may take minutes)")
    beating = asyncio.create_task(child.keep_beating())
    noting = asyncio.create_task(_note(leftovers))
    looking = asyncio.create_task(_look_after(child, settings, server.pid))
    waiting = [asyncio.create_task(event.wait()) for event in (stopping, ended)]
    await asyncio.wait((*waiting, looking), return_when=asyncio.FIRST_COMPLETED)
    beating.cancel()
    noting.cancel()
    leftovers.look()
    if looking.done() and not stopping.is_set():
        log.error(looking.result())
        return 1
    looking.cancel()
    if stopping.is_set():
        server.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERMINATE_TIMEOUT_S):
                await ended.wait()
        return 0
    log.error("%s has ended", settings.title, extra={"status": server.wait()})
    return 1


async def _note(leftovers: Leftovers) -> None:
    """Record the server's files in shared memory: a killed process can't be inspected any more."""
    while True:
        await asyncio.to_thread(leftovers.look)
        await asyncio.sleep(_NOTE_S)


async def _look_after(child: ChildProcess, settings: ServerProcess, pid: int) -> str:
    """Report when the server answers, and watch it; return the reason to end it."""
    start_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
    connector = aiohttp.UnixConnector(path=settings.socket_path)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while not await answers(session):
            if time.monotonic() > start_s + settings.start_timeout_s:
                return f"{settings.title} does not answer in time"
            await asyncio.sleep(_LOOK_AGAIN_S)
        spent_s = time.monotonic() - start_s
        child.report(f"{settings.title} answers, after {spent_s:.0f} s", ready=True)
        watch = ServerWatch(child.board, pid, name=settings.watched_name)
        while not watch.look(has_answered=await answers(session)):
            await asyncio.sleep(_WATCH_S)
    return f"{settings.title} does not go on"


def main() -> None:
    child = ChildProcess.start()
    settings = child.settings(ServerProcess)
    with started(settings) as (server, leftovers):
        status = asyncio.run(_run(child, settings, server, leftovers))
    sys.exit(status)


if __name__ == "__main__":
    main()
