from afferent.preprocess.media import Array
from afferent.preprocess.weights import Table

def resample(pixels: Array, across: Table, down: Table, out: Array, /) -> None:
    """Weigh RGB bytes across, round them to bytes, weigh these down, and put each where it belongs.

    Args:
        pixels: ``(rows, columns, 3)``, row by row or plane by plane.
        out: ``(3, rows ..., columns ...)``: of both sides, as many dimensions as one likes.

    Raises:
        ValueError: Something leads outside, or does not fit.
        MemoryError: There is not enough.
    """
