"""Which process has a store: a forked child has neither its parent's pins nor its map."""

from __future__ import annotations

import os

from afferent.errors import NotPermitted


class Owner:
    """The process that made this."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the one, not a child that it has forked."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse a forked child.

        Raises:
            NotPermitted: This is another process.
        """
        if not self.is_here:
            raise NotPermitted("a forked process has not the store of its parent: it needs its own")
