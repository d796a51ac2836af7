from typing import Final

from afferent.media.decoded import Array
from afferent.media.transforms.weights import Table

VARIANTS: Final[list[str]]
"""Variants of the code that this processor has, the fastest first: avx512, avx2, portable."""

def resample(pixels: Array, across: Table, down: Table, out: Array, variant: str, /) -> None:
    """Weigh RGB bytes across, round them to bytes, weigh these down, and write them into ``out``.

    Args:
        pixels: ``(rows, columns, 3)``, row by row or plane by plane.
        out: ``(3, rows ..., columns ...)``: each side may be cut into any number of dimensions.
        variant: One of `VARIANTS`; each writes the same bytes.

    Raises:
        ValueError: An index is out of bounds, a weight is not within 24 bits, the shapes do not
            match, or this processor lacks the variant.
        MemoryError: Memory is insufficient.
    """

def unfilter(rows: bytes | bytearray | memoryview | Array, out: Array, variant: str, /) -> None:
    """Undo the filters of a PNG's rows, and write the pixels into ``out``.

    Args:
        rows: What the file's data inflate to, and three bytes behind it, which have no effect.
        out: ``(rows, columns, channels)``, one behind the other; with 1, 3 or 4 channels.
        variant: One of `VARIANTS`; each writes the same bytes.

    Raises:
        ValueError: ``rows`` has another size, or a row an unknown filter, or this processor lacks
            the variant.
        MemoryError: Memory is insufficient.
    """
