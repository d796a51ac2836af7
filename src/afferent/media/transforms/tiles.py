"""Tiles and patches of one size, cut from an image row by row."""

from __future__ import annotations

import numpy as np

from afferent.media.decoded import Array, Pixels


def write_tiles(pixels: Pixels, out: Array) -> None:
    """Write the tiles of an image into ``out``, ``(rows * columns, 3, height, width)``.

    Args:
        pixels: Pixels of whole tiles, as many as there is space for.
        out: Target, the upper row's tiles first.
    """
    _, channels, height, width = out.shape
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    blocks = pixels.reshape(rows, height, columns, width, channels)
    grid = out.reshape(rows, columns, channels, height, width)
    np.copyto(grid, blocks.transpose(0, 2, 4, 1, 3))


def write_patch_rows(pixels: Pixels, out: Array, start: int) -> int:
    """Write the patches of an image side by side into ``out``, ``(3, side, columns)``.

    Args:
        pixels: Pixels of whole patches.
        out: Target, the upper row's patches first.
        start: First column that is written.

    Returns:
        The column after the last one.
    """
    channels, side, _ = out.shape
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    blocks = pixels.reshape(rows, side, columns, side, channels).transpose(4, 1, 0, 2, 3)
    end: int = start + rows * columns * side
    out[..., start:end] = blocks.reshape(channels, side, -1)
    return end
