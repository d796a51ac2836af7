"""Resizing pixels as torchvision does, or Pillow. Needs torch; frontends never call it.

A model's own processor resizes by torchvision where that is installed, as it is beside vLLM, and by
Pillow elsewhere. torchvision leaves bytes to torch's filters, whose results are the same here.

Pillow's results come several times faster by the same filters: over 99 % of the values are equal,
and of the rest few differ by more than 1 of 255 and none by more than 2
(`tests/preprocess/test_resize.py`). The two drift apart where an image is enlarged a lot; such
images are small, and Pillow does them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from afferent.preprocess.media import Pixels
from afferent.store.block.torch_tensors import as_tensor

_MODES = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}
_MAX_ENLARGEMENT = 2

S = TypeVar("S", bound=Struct)

ResizeRule = Literal["pillow", "torchvision"]
"""Whose results are meant."""


class Resampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How a model's processor brings pixels to another size.

    Attributes:
        filter: Pillow's number of it, as settings of processors have it.
        rule: Whose results are meant.
    """

    filter: int
    rule: ResizeRule = "pillow"

    def resize(self, pixels: Pixels, width: int, height: int) -> Pixels:
        """``pixels`` at another size, antialiased; themselves where the size is theirs already.

        Args:
            pixels: ``(rows, columns, 3)``.
            width: Of the result.
            height: Of the result.
        """
        if pixels.shape[:2] == (height, width):
            return pixels
        mode = _MODES.get(Image.Resampling(self.filter))
        if mode is not None and self.rule == "torchvision":
            return _pixels(_interpolate(_batch(pixels), height, width, mode))
        return _resize_like_pillow(pixels, width, height, self.filter, mode)


def by_rule(struct: S, rule: ResizeRule) -> S:
    """The same struct, where each `Resampling` in it follows this rule."""
    if isinstance(struct, Resampling):
        return msgspec.structs.replace(struct, rule=rule)
    members = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    changed = {name: by_rule(each, rule) for name, each in members if isinstance(each, Struct)}
    return msgspec.structs.replace(struct, **changed) if changed else struct


def _resize_like_pillow(
    pixels: Pixels, width: int, height: int, filter: int, mode: str | None
) -> Pixels:
    rows, columns = pixels.shape[:2]
    if mode is None or width > _MAX_ENLARGEMENT * columns or height > _MAX_ENLARGEMENT * rows:
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling(filter))
        return np.asarray(image)
    tensor = _batch(pixels)
    # Which direction goes first matters: values are clipped to bytes in between. torch begins with
    # the rows' own, and so does Pillow unless most of the work is in the other.
    if height < rows and rows - height > 2 * (columns - width):
        tensor = _interpolate(tensor, height, columns, mode)
    return _pixels(_interpolate(tensor, height, width, mode))


def _batch(pixels: Pixels) -> Any:
    """``(1, 3, rows, columns)``, the same memory."""
    return as_tensor(pixels).permute(2, 0, 1)[None]


def _pixels(batch: Any) -> Pixels:
    pixels: Pixels = batch[0].permute(1, 2, 0).numpy()
    return pixels


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
