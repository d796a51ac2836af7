"""Images for benchmarks: drawn, and the same in every run."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

_NUM_DRAWN = 2
_FIGURE = 0.55  # so that a page of 1275 x 1650 has some 570 KB
_FOOT_ROWS = 24
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_FILTER_UP = 2

_Rows = NDArray[np.uint8]


def photo(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw smooth colours with a little noise, which compress like photographs."""
    coarse = rng.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(image) + rng.normal(0, 6, (height, width, 3))
    clipped = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    return clipped.filter(ImageFilter.GaussianBlur(0.7))


def page(
    rng: np.random.Generator, width: int, height: int, *, figure: float = 1 / 3
) -> Image.Image:
    """Draw lines of small dark marks on white, and a figure; as a PNG it has some 500 KB.

    Args:
        figure: The width of the figure, as a part of the page's.
    """
    rows = np.full((height, width), 255, np.uint8)
    for top in range(60, height * 3 // 4, 22):
        marks = rng.integers(0, 3, (6, (width - 160) // 4)) == 0
        line = np.kron(marks, np.ones((2, 4))) * rng.integers(120, 256)
        rows[top : top + 12, 80 : 80 + line.shape[1]] -= line.astype(np.uint8)
    image = Image.fromarray(rows).convert("RGB").filter(ImageFilter.GaussianBlur(0.5))
    wide = round(width * figure)
    image.paste(photo(rng, wide, height // 6), ((width - wide) // 2, height * 4 // 5))
    return image


class PageFiles:
    """PNG files of different pages, one for each number.

    It takes a tenth of a second to draw and compress a page. So only a few are drawn, and the pages
    differ in a line at their foot. A copy of the compressor continues behind the common part.
    """

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        rng = np.random.default_rng(1)
        self._drawn = [self._draw(rng) for _ in range(_NUM_DRAWN)]

    def page(self, number: int) -> bytes:
        """Return the file of one page."""
        drawn = self._drawn[number % len(self._drawn)]
        compressor = drawn.compressor.copy()
        end = compressor.compress(_filtered(self._foot(number), above=drawn.last_row))
        return b"".join((drawn.start, _chunk(b"IDAT", end + compressor.flush()), _chunk(b"IEND")))

    def _draw(self, rng: np.random.Generator) -> _Drawn:
        rows = np.asarray(page(rng, self._width, self._height - _FOOT_ROWS, figure=_FIGURE))
        header = struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0)
        compressor = zlib.compressobj()
        data = compressor.compress(_filtered(rows, above=np.zeros_like(rows[0])))
        data += compressor.flush(zlib.Z_SYNC_FLUSH)
        start = b"".join((_SIGNATURE, _chunk(b"IHDR", header), _chunk(b"IDAT", data)))
        return _Drawn(start, rows[-1], compressor)

    def _foot(self, number: int) -> _Rows:
        """Return the rows with marks for the number."""
        rows = np.full((_FOOT_ROWS, self._width, 3), 255, np.uint8)
        marks = np.unpackbits(np.frombuffer(struct.pack(">Q", number), np.uint8))
        line = np.kron(marks.reshape(4, 16), np.ones((4, 2)))
        rows[4:20, 4:36] -= (line * 200).astype(np.uint8)[..., None]
        return rows


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A page up to its foot: the start of the file, and the compressor's state there."""

    start: bytes
    last_row: _Rows
    compressor: zlib._Compress


def _filtered(rows: _Rows, *, above: _Rows) -> bytes:
    """Return each row as the difference from the one above it, as PNG files store it."""
    flat = rows.reshape(len(rows), -1)
    out = np.full((len(rows), 1 + flat.shape[1]), _FILTER_UP, np.uint8)
    out[0, 1:] = flat[0] - above.reshape(-1)
    out[1:, 1:] = flat[1:] - flat[:-1]
    return out.tobytes()


def _chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
