"""Framing of a request's body: by its length, or by its chunks."""

from __future__ import annotations

import re
from typing import Final, Protocol

from afferent.proxy.http_server.head import BadRequest, parse_field
from afferent.types import KiB

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t -~\x80-\xff]{0,256})?\r\n")
_START_OF_SIZE_LINE: Final = re.compile(
    rb"(?:[0-9A-Fa-f]{1,16}(?:;[\t -~\x80-\xff]{0,256})?\r?)?\Z"
)
_MAX_CHUNK_NBYTES: Final = 1 << 31
_MAX_TRAILER_NBYTES: Final = 8 * KiB
_MANY_CHUNKS: Final = 1024
_LEAST_MEAN_NBYTES: Final = 16
"""Least mean size of many chunks: each chunk costs as much as some thousand bytes."""


class Framing(Protocol):
    """Body of one request, cut out of the bytes that the connection receives."""

    is_complete: bool

    def feed(self, data: bytes, pos: int, pieces: list[bytes]) -> int:
        """Append the body's bytes in ``data`` from ``pos`` on to ``pieces``.

        Returns:
            The position behind the consumed bytes; pass the rest again, with more behind it.

        Raises:
            BadRequest: These are not the bytes of a body.
        """


class LengthFraming:
    """Body with an announced length."""

    def __init__(self, nbytes: int) -> None:
        self._left_nbytes = nbytes
        self.is_complete = nbytes == 0

    def feed(self, data: bytes, pos: int, pieces: list[bytes]) -> int:
        piece = data[pos : pos + self._left_nbytes]  # the same object where it is all of it
        self._left_nbytes -= len(piece)
        self.is_complete = self._left_nbytes == 0
        if piece:
            pieces.append(piece)
        return pos + len(piece)


class ChunkedFraming:
    """Chunked body. Extensions and trailers are checked, bounded, and dropped: a trailer never
    becomes a header.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._left_nbytes = 0  # of the chunk
        self._is_in_chunk = self._is_in_trailers = False
        self._num_chunks = self._nbytes = self._trailers_nbytes = 0

    def feed(self, data: bytes, pos: int, pieces: list[bytes]) -> int:
        before = -1
        while pos != before and not self.is_complete:
            before = pos
            if self._is_in_chunk:
                pos = self._chunk(data, pos, pieces)
            elif self._is_in_trailers:
                pos = self._trailer(data, pos)
            else:
                pos = self._size(data, pos)
        return pos

    def _size(self, data: bytes, pos: int) -> int:
        if (line := _SIZE_LINE.match(data, pos)) is None:
            if _START_OF_SIZE_LINE.match(data, pos) is None:
                raise BadRequest("the size of a chunk is malformed")
            return pos
        nbytes = int(line[1], 16)
        if nbytes > _MAX_CHUNK_NBYTES:
            raise BadRequest(f"a chunk has more than {_MAX_CHUNK_NBYTES} bytes")
        self._is_in_chunk, self._is_in_trailers = nbytes > 0, nbytes == 0
        self._left_nbytes = nbytes
        self._num_chunks += 1
        self._nbytes += nbytes
        if self._num_chunks > _MANY_CHUNKS and self._nbytes < _LEAST_MEAN_NBYTES * self._num_chunks:
            raise BadRequest(f"the chunks have less than {_LEAST_MEAN_NBYTES} bytes on average")
        return line.end()

    def _chunk(self, data: bytes, pos: int, pieces: list[bytes]) -> int:
        if self._left_nbytes:
            piece = data[pos : pos + self._left_nbytes]
            if not piece:
                return pos
            self._left_nbytes -= len(piece)
            pieces.append(piece)
            pos += len(piece)
        if data.startswith(b"\r\n", pos) and not self._left_nbytes:
            self._is_in_chunk = False
            return pos + 2
        if not self._left_nbytes and data[pos : pos + 2] not in (b"", b"\r"):
            raise BadRequest("a chunk is longer than its size")
        return pos

    def _trailer(self, data: bytes, pos: int) -> int:
        end = data.find(b"\r\n", pos)
        if end < 0:
            if self._trailers_nbytes + len(data) - pos > _MAX_TRAILER_NBYTES:
                raise BadRequest("the trailers are too large", status=431)
            return pos
        if end == pos:
            self.is_complete = True
            return end + 2
        self._trailers_nbytes += end - pos
        if self._trailers_nbytes > _MAX_TRAILER_NBYTES or parse_field(data[pos:end]) is None:
            raise BadRequest("the trailers are malformed, or too large")
        return end + 2


def framing_of(length: int | None) -> Framing:
    """Return the framing of a body.

    Args:
        length: Bytes of the body; ``None`` for a chunked body.
    """
    return ChunkedFraming() if length is None else LengthFraming(length)
