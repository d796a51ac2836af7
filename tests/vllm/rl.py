"""Program of `test_rl.py`: the example, whose processes are examined before the trainer ends.

It prints a line for each process that maps the features of an image.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import existing
from afferent.types import Handle
from benchmarks.gate_memory import trees
from examples import rl_rollouts

_ARENA = re.compile(r"^(\w+)-(\w+) \S+ (\w+) \S+ (\d+)\s+/memfd:afferent-arena", re.M)
_FRAME = (1 << 55) - 1
_IS_PRESENT = 1 << 63


class ExaminedTrainer(rl_rollouts.Trainer):
    """Trainer of the example that shows the physical pages of an image before it ends."""

    def __exit__(self, *error: object) -> None:
        image: Any = self._task.rollouts[0].image
        with DaemonStore(image._address, name="test") as store:
            (outcome,) = store.acquire("test", [Find(image.key)])
            handle = existing(outcome)
            assert handle is not None
        for pid in trees([os.getpid()]):
            role = _role(pid, self.process.pid)
            for inode, frames in _frames(pid, handle):
                print(f"mapped by {role}: {inode} {frames}")
        super().__exit__(*error)


def _role(pid: int, trainer: int | None) -> str:
    if pid == trainer:
        return "trainer"
    if pid == os.getpid():
        return "program"
    return "engine" if "/vllm/_C" in Path(f"/proc/{pid}/maps").read_text() else "other"


def _frames(pid: int, handle: Handle) -> Iterator[tuple[str, list[int]]]:
    """Yield the inode and the physical pages of a block in each mapping that has all of them.

    Without privileges, the kernel shows each page as 0.
    """
    for start, end, offset, inode in _ARENA.findall(Path(f"/proc/{pid}/maps").read_text()):
        first = int(start, 16) + handle.offset - int(offset, 16)
        if int(start, 16) <= first and first + handle.nbytes <= int(end, 16):
            pages = range(first // mmap.PAGESIZE, (first + handle.nbytes - 1) // mmap.PAGESIZE + 1)
            with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
                file.seek(8 * pages.start)
                entries = struct.unpack(f"{len(pages)}Q", file.read(8 * len(pages)))
            if all(entry & _IS_PRESENT for entry in entries):
                yield inode, [entry & _FRAME for entry in entries]


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # vLLM writes there, too
    rl_rollouts.Trainer = ExaminedTrainer  # type: ignore[misc]
    rl_rollouts.main(sys.argv[1:])


if __name__ == "__main__":
    main()
