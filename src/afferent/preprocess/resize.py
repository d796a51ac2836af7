"""Resizing pixels as Pillow does, several times faster. Needs torch; frontends never call it.

torch's filters for bytes follow Pillow's: over 99 % of the values are equal, and of the rest few
differ by more than 1 of 255 and none by more than 2 (`tests/preprocess/test_resize.py`). The two
drift apart where an image is enlarged a lot; such images are small, and Pillow does them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from PIL import Image

from afferent.preprocess.media import Pixels
from afferent.store.block.torch_tensors import as_tensor

_MODES = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}
_MAX_ENLARGEMENT = 2


def resize(pixels: Pixels, width: int, height: int, resample: int) -> Pixels:
    """``pixels`` at another size, antialiased; themselves where the size is theirs already.

    Args:
        pixels: ``(rows, columns, 3)``.
        width: Of the result.
        height: Of the result.
        resample: Pillow's number of the filter, as settings of processors have it.
    """
    rows, columns = pixels.shape[:2]
    if (columns, rows) == (width, height):
        return pixels
    mode = _MODES.get(Image.Resampling(resample))
    if mode is None or width > _MAX_ENLARGEMENT * columns or height > _MAX_ENLARGEMENT * rows:
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
        return np.asarray(image)
    tensor = as_tensor(pixels).permute(2, 0, 1)[None]
    # Which direction goes first matters: values are clipped to bytes in between. torch begins with
    # the rows' own, and so does Pillow unless most of the work is in the other.
    if height < rows and rows - height > 2 * (columns - width):
        tensor = _interpolate(tensor, height, columns, mode)
    tensor = _interpolate(tensor, height, width, mode)
    resized: Pixels = tensor[0].permute(1, 2, 0).numpy()
    return resized


@functools.cache
def load() -> Any:
    """torch's functions; a zygote calls this so that its forks have them."""
    # Frontends and the supervisor import this module with a family, and have no memory for torch.
    from torch.nn import functional

    return functional


def _interpolate(tensor: Any, height: int, width: int, mode: str) -> Any:
    try:
        return load().interpolate(tensor, size=(height, width), mode=mode, antialias=True)
    except RuntimeError as error:  # torch's way to say that there is no memory
        raise MemoryError from error
