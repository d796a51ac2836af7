from afferent.media.decoded import Array
from afferent.media.transforms.weights import Table

def resample(pixels: Array, across: Table, down: Table, out: Array, /) -> None:
    """Weigh RGB bytes across, round them to bytes, weigh these down, and write them into ``out``.

    Args:
        pixels: ``(rows, columns, 3)``, row by row or plane by plane.
        out: ``(3, rows ..., columns ...)``: each side may be cut into any number of dimensions.

    Raises:
        ValueError: An index is out of bounds, or the shapes do not match.
        MemoryError: Memory is insufficient.
    """
