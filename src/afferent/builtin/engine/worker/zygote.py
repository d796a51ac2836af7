"""Zygote of an engine worker: it has done the slow imports, and forks the worker, again after each
loss.

It starts no thread, and never uses a GPU: neither would exist in the fork.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable

from afferent.runtime import shortage
from afferent.runtime.process import LOST_PARTNERS, ChildProcess, die_with_parent

log = logging.getLogger(__name__)

_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM})
_AGAIN_S = 0.05


def keep_one(child: ChildProcess, work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this process, and in the next one when it has ended, until SIGTERM.

    It also returns when a fork has ended before its first heartbeat, unless it ended with
    `LOST_PARTNERS`. Then the supervisor decides.

    Returns:
        The exit status for this process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.freeze()  # or the fork's first collection would copy the pages of all that is loaded
    while True:
        code = _wait(_fork(work))
        if code is None:
            return 0
        has_worked = child.board is not None and bool(child.board.read([child.name]))
        if child.board is not None:
            child.board.rest(child.name)
        if not has_worked and code != LOST_PARTNERS:
            return code if code > 0 else 1
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        child.report(f"has ended ({how}); it is forked again")
        time.sleep(_AGAIN_S)


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if why := shortage.explain(error):
            log.error("the worker failed: %s", why)  # noqa: TRY400 - no fault of ours to trace
        else:
            log.exception("the worker failed")
    finally:
        os._exit(code)


def _wait(pid: int) -> int | None:
    """Return the exit status of the process, negative for a signal; ``None``: SIGTERM has come."""
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_signo == signal.SIGTERM:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            return None
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
