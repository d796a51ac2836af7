"""Preprocess pool: a zygote that has everything loaded, and the workers that it forks.

    python -m afferent.media.workers.pool FD      (started by the supervisor)

Loading a model's processor takes seconds, a fork milliseconds; so a dead worker is replaced at
once. The zygote never starts a thread: a fork of a process with threads may hang.

Workers are confined, and don't write heartbeats: the zygote does so for workers that are not
stopped, by the kernel's status. The store limits the time of a job.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afferent.errors import ConfigError, Unavailable, UnsupportedModel
from afferent.media.families.registry import runs_foreign_code
from afferent.media.workers import sandbox
from afferent.media.workers.launch import PoolSettings, worker_names
from afferent.media.workers.worker import Worker, load_lazy_modules
from afferent.runtime.heartbeat import PERIOD_S, Board, Watch
from afferent.runtime.proc_stat import ProcStat
from afferent.runtime.process import ChildProcess, die_with_parent
from afferent.store.client.daemon_store import DaemonStore

log = logging.getLogger(__name__)

_NICENESS = 10
_CANT_CONFINE = 78
_LONG_LIFE_S = 1.0
_DELAYS_S = (0.0, 0.0, 0.1, 0.5, 1.0, 5.0)
"""Delay of a worker's replacement, by the number of consecutive short lives."""
_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM})


@dataclass(slots=True)
class _Place:
    """Slot of the pool, for one worker after another."""

    name: str
    started_s: float = 0.0
    num_short_lives: int = 0


class Zygote:
    def __init__(self, child: ChildProcess, settings: PoolSettings) -> None:
        self._child, self._settings = child, settings
        sandbox.check_machine()
        load_lazy_modules()
        settings.family.load()
        self._places: dict[int, _Place] = {}  # by the worker's pid
        self._due: list[tuple[float, _Place]] = []  # empty slots, with the time to fill each
        self._is_stopping = False
        self._watch = None if child.board is None else _WorkerWatch(child.board)

    def run(self) -> None:
        """Keep the workers alive until SIGTERM."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if num_threads != 1:
            log.warning("the zygote has threads", extra={"num_threads": num_threads})
        gc.freeze()  # else a worker's first collection would copy the pages of all loaded objects
        for name in worker_names(self._settings):
            self._fork(_Place(name))
        self._child.report(f"{self._settings.num_workers} workers", ready=True)
        while self._places or self._due:
            self._child.beat()
            if self._watch is not None:
                self._watch.look({pid: place.name for pid, place in self._places.items()})
            self._wait()
            self._reap()
            self._fill()

    def _wait(self) -> None:
        """Wait until a worker has died, a slot or a heartbeat is due, or the pool has to stop."""
        now_s = time.monotonic()
        left_s = min((due_s - now_s for due_s, _ in self._due), default=PERIOD_S)
        received = signal.sigtimedwait(_SIGNALS, min(max(left_s, 0.0), PERIOD_S))
        if received is not None and received.si_signo == signal.SIGTERM:
            self._is_stopping = True
            self._due.clear()
            for pid in self._places:
                os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        while self._places:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            place = self._places.pop(pid)
            if self._watch is not None:
                self._watch.forget(place.name)
            if self._is_stopping:
                continue
            now_s = time.monotonic()
            code = os.waitstatus_to_exitcode(status)
            if code == _CANT_CONFINE:  # the next one would fail too
                raise ConfigError("a preprocess worker can't be confined; the log says why")
            is_short = now_s - place.started_s < _LONG_LIFE_S
            place.num_short_lives = place.num_short_lives + 1 if is_short else 0
            delay_s = _DELAYS_S[min(place.num_short_lives, len(_DELAYS_S) - 1)]
            log.warning(
                "a worker has died; it is replaced",
                extra={"worker": place.name, "was": code},
            )
            self._due.append((now_s + delay_s, place))

    def _fill(self) -> None:
        now_s = time.monotonic()
        for due in [due for due in self._due if due[0] <= now_s]:
            self._due.remove(due)
            self._fork(due[1])

    def _fork(self, place: _Place) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            place.started_s = time.monotonic()
            self._places[pid] = place
            return
        code = 1
        try:
            die_with_parent(parent)
            self._child.leave()  # a compromised decoder must not write heartbeats or reports
            self._work(place.name)
            code = 0
        except SystemExit:
            code = 0
        except ConfigError as error:
            log.error(error.message)  # noqa: TRY400 it says all there is to say
            code = _CANT_CONFINE
        except Unavailable:
            log.debug("the store is gone")
        except BaseException:
            log.exception("a worker failed")
        finally:
            os._exit(code)

    def _work(self, name: str) -> None:
        """Run a worker, in the forked process."""
        settings = self._settings
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        gc.enable()
        os.nice(_NICENESS)
        _keep_libraries_quiet()
        sandbox.drop_capabilities()  # the store starts a thread
        store = DaemonStore(settings.store_address, name=name, writable=True)
        sandbox.enter(
            memory_nbytes=settings.memory_nbytes,
            runs_foreign_code=runs_foreign_code(settings.family),
        )
        Worker(
            store,
            settings.family,
            name=name,
            limits=settings.limits,
            item_cpu_s=settings.item_timeout_s,
        ).run()


class _WorkerWatch:
    """Watch of workers: heartbeats for running ones, a kill for ones stopped too long."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._watch = Watch(timeout_s=board.place.frozen_timeout_s)

    def look(self, workers: Mapping[int, str]) -> None:
        """Check the current ``workers``, names by pid."""
        for pid, name in workers.items():
            stat = ProcStat.read(pid)
            if stat is not None and not stat.is_stopped:
                self._board.beat(name)
        self._watch.look(self._board.read(workers.values()), now_s=time.monotonic())
        overdue = self._watch.overdue
        for pid in [pid for pid, name in workers.items() if name in overdue]:
            log.warning("a worker does not go on; it is killed", extra={"worker": workers[pid]})
            self.forget(workers[pid])
            os.kill(pid, signal.SIGKILL)

    def forget(self, name: str) -> None:
        """Unregister a worker that has ended."""
        self._board.rest(name)


def _keep_libraries_quiet() -> None:
    """Discard what decoders print to stderr; our own log still goes there."""
    ours = open(os.dup(2), "w", buffering=1)  # noqa: SIM115, PTH123 for the process's life
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(ours)
    sys.stderr = ours
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def main() -> None:
    child = ChildProcess.start()
    child.report("loading the model's processor")
    try:
        Zygote(child, child.settings(PoolSettings)).run()
    except UnsupportedModel as error:
        child.refuse(error.message)
    except ConfigError as error:
        log.error(error.message)  # noqa: TRY400
        raise SystemExit(1) from None
    os._exit(0)  # nothing is left to do, and the teardown of torch takes longer than all else


if __name__ == "__main__":
    main()
