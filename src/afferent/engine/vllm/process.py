"""Keeps one vLLM running: starts it, says when it answers, and ends with it.

python -m afferent.engine.vllm.process FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from afferent.engine.vllm.launch import VllmProcess
from afferent.runtime.process import ChildProcess, die_with_parent

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2
_LOOK_TIMEOUT_S = 5.0
_TERMINATE_TIMEOUT_S = 4.0


async def _run(child: ChildProcess, settings: VllmProcess) -> int:
    path = Path(settings.socket_path)
    path.unlink(missing_ok=True)
    parent_pid = os.getpid()
    vllm = subprocess.Popen(  # noqa: ASYNC220 - it is started once, and lives as long as we do
        settings.command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent_pid),
    )
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    ended = loop.create_future()
    pidfd = os.pidfd_open(vllm.pid)
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    child.report("starting vLLM (a minute, or more)")
    tasks = [
        asyncio.ensure_future(ended),
        asyncio.create_task(stopping.wait()),
        asyncio.create_task(_report_when_ready(child, settings)),
    ]
    try:
        done, _ = await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        tasks[2].cancel()
        if tasks[1] in done and tasks[0] not in done:
            vllm.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TERMINATE_TIMEOUT_S):
                    await tasks[0]
            return 0
        code = vllm.wait()
        log.error("vLLM has ended", extra={"status": code})
        return 1
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        _kill_session(vllm.pid)
        vllm.wait()
        path.unlink(missing_ok=True)


async def _report_when_ready(child: ChildProcess, settings: VllmProcess) -> None:
    start_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
    connector = aiohttp.UnixConnector(path=settings.socket_path)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while time.monotonic() < start_s + settings.start_timeout_s:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get("http://vllm/health") as answer:
                    if answer.status == 200:
                        took_s = time.monotonic() - start_s
                        child.report(f"vLLM answers, after {took_s:.0f} s", ready=True)
                        return
            await asyncio.sleep(_LOOK_AGAIN_S)
    log.error("vLLM does not answer in time")
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_session(pid: int) -> None:
    """End what is left of its processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    child = ChildProcess.start()
    sys.exit(asyncio.run(_run(child, child.settings(VllmProcess))))


if __name__ == "__main__":
    main()
