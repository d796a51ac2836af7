"""The preprocess pool: a zygote that has everything loaded, and the workers that it forks.

    python -m afferent.preprocess.pool FD      (started by the supervisor)

Loading the image processor takes seconds, a fork milliseconds; so a worker that dies is replaced at
once. The zygote never starts a thread: a fork of a process with threads may hang.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType

from msgspec import Struct

from afferent.errors import Unavailable
from afferent.preprocess.family import Family
from afferent.preprocess.processor import HuggingFaceProcessor
from afferent.preprocess.worker import work
from afferent.process import ChildProcess, die_with_parent
from afferent.store.client import DaemonStore

log = logging.getLogger(__name__)

_NICENESS = 10
_MIN_LIFE_S = 1.0
THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""What the pool's environment has to say: one thread a library, in every worker."""


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    store_address: str
    model_folder: str
    family: Family
    num_workers: int


class Zygote:
    def __init__(self, child: ChildProcess, settings: Settings) -> None:
        self._child, self._settings = child, settings
        self._processor = HuggingFaceProcessor(Path(settings.model_folder), settings.family)
        self._workers: dict[int, tuple[str, float]] = {}  # pid: name, start
        self._stopping = False

    def run(self) -> None:
        """Keep the workers alive until SIGTERM."""
        signal.signal(signal.SIGTERM, self._stop)
        num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if num_threads != 1:
            log.warning("the zygote has threads", extra={"num_threads": num_threads})
        for index in range(self._settings.num_workers):
            self._fork(f"preprocess-{index}")
        text = f"{self._settings.num_workers} workers"
        self._child.report(text, ready=True)
        while self._workers:
            pid, status = os.wait()
            name, started_s = self._workers.pop(pid)
            if self._stopping:
                continue
            log.warning("a worker has died; it is replaced", extra={"worker": name, "was": status})
            if time.monotonic() - started_s < _MIN_LIFE_S:
                time.sleep(_MIN_LIFE_S)
            self._fork(name)

    def _fork(self, name: str) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._workers[pid] = (name, time.monotonic())
            if self._stopping:  # the signal came while we forked
                os.kill(pid, signal.SIGTERM)
            return
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(parent)
            os.nice(_NICENESS)
            store = DaemonStore(self._settings.store_address, name=name, writable=True)
            work(store, self._processor, process_name=name)
        except Unavailable:
            log.debug("the store is gone")
        except BaseException:
            log.exception("a worker failed")
        finally:
            os._exit(code)

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        self._stopping = True
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)


def main() -> None:
    child = ChildProcess.start()
    child.report("loading the image processor")
    Zygote(child, child.settings(Settings)).run()


if __name__ == "__main__":
    main()
