"""A reader for `afferent.bench.store`: a process that gets objects as it is told to.

    python -m afferent.bench.reader ADDRESS

Each line of its input is a `Task` in JSON; each line of its output the microseconds of every get.
"""

from __future__ import annotations

import pickle
import sys
import time

import msgspec
from msgspec import Struct

from afferent.store import codec
from afferent.store.client import DaemonStore
from afferent.types import Handle


class Task(Struct):
    """``pace_hz`` 0 gets again at once; else ``phase``, of a period, is what each gets later.

    ``pickled_nbytes``: that many bytes of pickle follow, which are read and no more.
    """

    handle: Handle | None = None
    num_gets: int = 0
    pace_hz: float = 0.0
    phase: float = 0.0
    pickled_nbytes: int = 0


def main() -> None:
    with DaemonStore("\0" + sys.argv[1], name="reader") as store:
        store.wait_populated()
        _answer([])
        while line := sys.stdin.buffer.readline():
            task = msgspec.json.decode(line, type=Task)
            if task.pickled_nbytes:
                pickle.loads(sys.stdin.buffer.read(task.pickled_nbytes))  # noqa: S301 the control
                _answer([])
            elif task.handle is not None:
                _answer(_get_often(store, task.handle, task))


def _get_often(store: DaemonStore, handle: Handle, task: Task) -> list[float]:
    samples = []
    next_s = time.perf_counter() + (task.phase / task.pace_hz if task.pace_hz else 0.0)
    for _ in range(task.num_gets):
        if task.pace_hz:
            next_s += 1 / task.pace_hz
            time.sleep(max(0.0, next_s - time.perf_counter()))
        start = time.perf_counter()
        store.get("bench", [handle])
        tree = codec.view(store.block(handle))
        samples.append((time.perf_counter() - start) * 1e6)
        del tree
        store.forget("bench")
    return samples


def _answer(samples: list[float]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(samples) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
