"""Owner process of a store: a forked child has neither its parent's pins nor its map."""

from __future__ import annotations

import os
from typing import NoReturn

from afferent.errors import NotPermitted

_pid = os.getpid()


def _renew_pid() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_renew_pid)


class Owner:
    """Process that opened a store; no other process can use it.

    Args:
        opening: Line of code by which another process opens its own store.
    """

    def __init__(self, opening: str) -> None:
        self._pid = _pid
        self._opening = opening

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner, and not a forked child.

        Without a system call, of which some machines take 5 us.
        """
        return _pid == self._pid

    def check(self) -> None:
        """Refuse a forked child.

        Raises:
            NotPermitted: This is another process.
        """
        if not self.is_here:
            raise NotPermitted(
                "a forked process has not the store of its parent: it needs its own. "
                f"Open it in that process, as by: {self._opening}"
            )

    def refuse_pickle(self) -> NoReturn:
        """Refuse to copy the store or to send it to another process.

        Raises:
            NotPermitted: Always.
        """
        raise NotPermitted(
            "a store can't be pickled or copied: its connection and its memory are of one process. "
            f"Hand over the address, and open a store in that process, as by: {self._opening}"
        )
