"""Layout of an image's pixels in the patches that a vision transformer reads."""

from __future__ import annotations

from afferent.media.decoded import Array


def patch_views(
    patches: Array,
    rows: int,
    columns: int,
    *,
    patch_size: int,
    merge_size: int,
    num_frames: int = 1,
) -> Array:
    """Return a view of ``patches`` for `Resampling.write`, one for each frame.

    Patches that the model merges later, ``merge_size`` by ``merge_size``, are adjacent.

    Args:
        patches: ``(rows * columns, 3 * num_frames * patch_size**2)``; each patch channel by
            channel, and each channel frame by frame.
        rows: Rows of patches; a multiple of ``merge_size``.
        columns: Likewise.
        patch_size: Side of a patch in pixels.
        merge_size: Side of a group of patches.

    Returns:
        ``(num_frames, 3, rows, columns)`` of pixels, where each side is cut in three: groups, the
        patches of a group, the pixels of a patch.
    """
    patch, merge = patch_size, merge_size
    groups = (rows // merge, columns // merge, merge, merge, 3, num_frames, patch, patch)
    return patches.reshape(groups).transpose(5, 4, 0, 2, 6, 1, 3, 7)
