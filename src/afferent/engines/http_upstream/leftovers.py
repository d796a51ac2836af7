"""Files that a killed server leaves in /dev/shm: found while it runs, removed when it has ended.

Segments (`psm_...`) and semaphores (`sem.mp-...`) outlive processes that have no time to unlink
them. A file counts as the server's if a process of its session has mapped it and it did not exist
when that session began. It is removed when no process has it mapped any more. Files are identified
by inode: a semaphore is mapped under a temporary name.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from afferent.engines.http_upstream.health import pids_of_session

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the kernel's own folder
_MAPPED: Final = re.compile(rb" ([0-9]+) +/dev/shm/")
_POLL_S: Final = 0.01


class Leftovers:
    """Files in /dev/shm of one session.

    Invariants:
        - `_seen` holds inodes of files that a process of the session had mapped, and that did not
          exist when the session began.
    """

    def __init__(self, session: int) -> None:
        """List the existing files.

        Args:
            session: Session of a process that has just been started.
        """
        self._session = session
        self._before = {inode for _, inode in _files()}
        self._seen: set[int] = set()

    def look(self) -> None:
        """Record the files that the session has mapped now."""
        self._seen |= _mapped(pids_of_session(self._session)) - self._before

    def await_end(self, timeout_s: float) -> None:
        """Wait until the session has unmapped its files: a killed process does so a bit later."""
        deadline_s = time.monotonic() + timeout_s
        while self._seen & _mapped(pids_of_session(self._session)):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)

    def remove(self) -> None:
        """Remove the files that no process uses any more; the session has ended."""
        if not self._seen:
            return
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        unused = self._seen - _mapped(pids)
        for path, inode in _files():
            if inode in unused:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._seen.clear()


def _files() -> Iterator[tuple[Path, int]]:
    """Yield the files in /dev/shm, with their inodes."""
    with contextlib.suppress(OSError):
        for path in _SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                yield path, path.lstat().st_ino


def _mapped(pids: Iterable[int]) -> set[int]:
    """Return the inodes of files in /dev/shm that these processes have mapped."""
    inodes = set[int]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            maps = Path(f"/proc/{pid}/maps").read_bytes()
            inodes |= set(map(int, _MAPPED.findall(maps)))
    return inodes
