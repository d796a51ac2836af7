"""Reads of sockets into memory that all connections of a server share.

The event loop would read as much as there is, up to 256 KiB: the first part of a body would be as
long, and each client whose body has to wait would hold so much.
"""

from __future__ import annotations

import asyncio

from afferent.proxy.http_server.flow import MAX_BUFFERED_NBYTES
from afferent.proxy.http_server.shared import Shared

FIRST_NBYTES = MAX_BUFFERED_NBYTES
"""Longest read of a head, and of the beginning of a body: reading pauses behind one such read."""


class ReadingProtocol(asyncio.BufferedProtocol):
    """Protocol that gets what was read as bytes of its own."""

    _shared: Shared

    def data_received(self, data: bytes) -> None:
        """Take the bytes of one read."""
        raise NotImplementedError

    @property
    def most_nbytes(self) -> int:
        """Longest next read."""
        return FIRST_NBYTES

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.memory[: self.most_nbytes]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._shared.memory[:nbytes]))
