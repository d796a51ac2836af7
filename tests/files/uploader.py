"""A process that stores files, and is killed at one of its calls of the system.

    python -m tests.files.uploader FOLDER

It forks a child for each line of its input: ``before N`` or ``after N``. The child is killed at its
N-th call. The answer is a line: ``killed``, or ``ended`` after the last call, and the ids of the
files that the child has acknowledged until then.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from afferent.files.file_store import FileLimits, Quota, open_store
from afferent.files.stored_file import FILE

CALLS = ("open", "close", "mkdir", "scandir", "ftruncate", "pwrite", "fsync", "rename", "unlink")
LIMITS = FileLimits(max_nbytes=1 << 20, quota=Quota(1 << 22, 100))


def content(index: int) -> bytes:
    return bytes([index]) * (50_000 * index + 1)


def child(folder: str, when: str, at: int, answers: int) -> NoReturn:
    num = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num
            num += 1
            mine = num
            if mine == at and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **kwargs)
            finally:
                if mine == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    fcntl.flock = deadly(fcntl.flock)
    store = open_store(folder, LIMITS)
    told: list[str] = []
    for index in range(1, 4):
        file = store.begin("", announced_nbytes=None)
        for _ in range(2):
            file.write(content(index))
        done = file.commit(
            store.new_id(FILE), name=f"{index}", media_type="image/png", purpose="vision"
        )
        told.append(done.id)
        os.write(answers, f"+{done.id}\n".encode())
        if index == 2:
            os.write(answers, f"-{told[0]}\n".encode())
            store.delete("", told[0])
    os._exit(0)


def main() -> None:
    folder = sys.argv[1]
    for line in sys.stdin:
        when, at = line.split()
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            child(folder, when, int(at), write)
        os.close(write)
        with os.fdopen(read, encoding="ascii") as answers:
            said = answers.read().split()
        _, status = os.waitpid(pid, 0)
        ended = "killed" if os.WIFSIGNALED(status) else f"ended {os.WEXITSTATUS(status)}"
        print(json.dumps([ended, said]), flush=True)


if __name__ == "__main__":
    main()
