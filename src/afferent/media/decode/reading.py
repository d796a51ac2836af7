"""Files over shared memory, for PyAV and soundfile."""

from __future__ import annotations

import io
import os

Bytes = bytes | memoryview


class MemoryFile(io.RawIOBase):
    """Read-only file over ``data``. It copies only bytes that are read; `close` releases it."""

    def __init__(self, data: Bytes) -> None:
        super().__init__()
        self._data = memoryview(data).cast("B")
        self._at = 0

    @property
    def view(self) -> memoryview:
        """All bytes, without a copy; to be released before `close`."""
        return self._data[:]

    def close(self) -> None:
        self._data.release()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._at + size
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
