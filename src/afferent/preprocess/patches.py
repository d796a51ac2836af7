"""Cutting an image into the patches that a vision transformer reads."""

from __future__ import annotations

from afferent.preprocess.media import Array, Pixels


def write_patches(pixels: Pixels, out: Array, *, patch_size: int, merge_size: int) -> None:
    """Write the patches of ``pixels`` into ``out``, in one pass.

    Patches that the model merges later, ``merge_size`` by ``merge_size``, follow each other.

    Args:
        pixels: ``(height, width, 3)``, both sides multiples of ``patch_size * merge_size``.
        out: ``(num_patches, 3 * patch_size**2)``; each patch channel by channel.
        patch_size: Side of a patch in pixels.
        merge_size: Side of a group of patches.
    """
    patch, merge = patch_size, merge_size
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    groups = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
    shape = (rows, columns, merge, merge, 3, patch, patch)
    out.reshape(shape)[...] = groups.transpose(0, 3, 1, 4, 6, 2, 5)
