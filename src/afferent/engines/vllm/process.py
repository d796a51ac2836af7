"""Parent process of one vLLM: starts it, reports when it answers, and ends with it.

python -m afferent.engines.vllm.process FD      (started by the supervisor)
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

from afferent.engines.vllm.health import VllmWatch, answers
from afferent.engines.vllm.launch import VllmProcess
from afferent.engines.vllm.leftovers import Leftovers
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
_RPC = "VLLM_RPC_BASE_PATH"
_SOCKET_NBYTES = len("/") + 36
"""Length of the name of a socket of vLLM's: a UUID."""


@contextmanager
def started(settings: VllmProcess) -> Iterator[tuple[subprocess.Popen[bytes], Leftovers]]:
    """Run a vLLM in a session of its own, and end the whole session at the end."""
    path, parent_pid = Path(settings.socket_path), os.getpid()
    is_json = isinstance(sys.stderr, logs.JsonLines)
    path.unlink(missing_ok=True)
    vllm = subprocess.Popen(
        settings.command,
        env={**_sockets(), **os.environ},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent_pid),
        stdout=subprocess.PIPE if is_json else None,
        stderr=subprocess.STDOUT if is_json else None,
    )
    if vllm.stdout is not None:
        output = io.TextIOWrapper(vllm.stdout, encoding="utf-8", errors="replace")
        threading.Thread(target=_forward, args=(output,), name="vllm-output", daemon=True).start()
    leftovers = Leftovers(vllm.pid)
    try:
        yield vllm, leftovers
    finally:
        leftovers.look()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(vllm.pid, signal.SIGKILL)
        vllm.wait()
        path.unlink(missing_ok=True)
        leftovers.await_end(_KILLED_TIMEOUT_S)
        leftovers.remove()


def _forward(output: io.TextIOWrapper) -> None:
    """Print vLLM's output as events, until all of its processes have ended."""
    with output:
        logs.forward(output, process="vllm")


def _sockets() -> dict[str, str]:
    """Return the environment that places the sockets of vLLM's processes in this process's folder,
    which is removed with it.
    """
    folder = str(own_folder())
    return {_RPC: folder} if len(folder) + _SOCKET_NBYTES <= MAX_PATH_NBYTES else {}


async def _run(
    child: ChildProcess,
    settings: VllmProcess,
    vllm: subprocess.Popen[bytes],
    leftovers: Leftovers,
) -> int:
    """Run until vLLM ends, which is an error, or until it hangs, or until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping, ended = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    pidfd = os.pidfd_open(vllm.pid)
    loop.add_reader(pidfd, ended.set)
    child.report("starting vLLM (a minute, or more)")
    beating = asyncio.create_task(child.keep_beating())
    noting = asyncio.create_task(_note(leftovers))
    looking = asyncio.create_task(_look_after(child, settings, vllm.pid))
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
        vllm.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERMINATE_TIMEOUT_S):
                await ended.wait()
        return 0
    log.error("vLLM has ended", extra={"status": vllm.wait()})
    return 1


async def _note(leftovers: Leftovers) -> None:
    """Record vLLM's files in shared memory: a killed process can't be inspected any more."""
    while True:
        await asyncio.to_thread(leftovers.look)
        await asyncio.sleep(_NOTE_S)


async def _look_after(child: ChildProcess, settings: VllmProcess, pid: int) -> str:
    """Report when vLLM answers, and watch it; return the reason to end it."""
    start_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
    connector = aiohttp.UnixConnector(path=settings.socket_path)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while not await answers(session):
            if time.monotonic() > start_s + settings.start_timeout_s:
                return "vLLM does not answer in time"
            await asyncio.sleep(_LOOK_AGAIN_S)
        child.report(f"vLLM answers, after {time.monotonic() - start_s:.0f} s", ready=True)
        watch = VllmWatch(child.board, pid)
        while not watch.look(has_answered=await answers(session)):
            await asyncio.sleep(_WATCH_S)
    return "vLLM does not go on"


def main() -> None:
    child = ChildProcess.start()
    settings = child.settings(VllmProcess)
    with started(settings) as (vllm, leftovers):
        status = asyncio.run(_run(child, settings, vllm, leftovers))
    sys.exit(status)


if __name__ == "__main__":
    main()
