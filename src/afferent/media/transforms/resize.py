"""Resizing of pixels by torchvision's or Pillow's rule, directly into features; workers only.

A model's own processor resizes with torchvision if that is installed, as it is beside vLLM, and
else with Pillow. The compiled part reproduces the bytes of either. If it could not be built
(`docs/adr/0034`), Pillow itself resizes by Pillow's rule, and torch by torchvision's. The bytes are
the same in each case, so features of one key do not depend on the installation of a node
(`docs/adr/0040`).
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from afferent.media import native
from afferent.media.decoded import Array, Pixels
from afferent.media.transforms import weights
from afferent.media.transforms.weights import AS_IT_IS, Rule
from afferent.store.block.torch_tensors import as_tensor

log = logging.getLogger(__name__)

_MODES = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}

S = TypeVar("S", bound=Struct)

ResizeRule = Rule
"""Library whose results are reproduced."""


class Resampling(Struct, frozen=True, forbid_unknown_fields=True):
    """Resizing of pixels by a model's processor.

    Attributes:
        filter: Pillow's number of it, as in settings of processors.
        rule: Library whose results are reproduced.
    """

    filter: int
    rule: ResizeRule = "pillow"

    def resize(self, pixels: Pixels, width: int, height: int) -> Pixels:
        """Return ``pixels`` at another size, antialiased; ``pixels`` itself if they have that size.

        Args:
            pixels: ``(rows, columns, 3)``.
            width: Of the result.
            height: Of the result.
        """
        if pixels.shape[:2] == (height, width):
            return pixels
        if not self._is_compiled:
            return self._resized_by_others(pixels, width, height)
        out: Array = np.empty((3, height, width), np.uint8)
        self.write(pixels, out)
        return out.transpose(1, 2, 0)

    def write(self, pixels: Pixels, out: Array) -> None:
        """Resize pixels into ``out``, without an intermediate picture if possible.

        Args:
            pixels: As for `resize`.
            out: ``(3, rows ..., columns ...)``: a view of the target, in which each side may be cut
                into as many dimensions as the other.
        """
        half = out.ndim // 2
        height, width = math.prod(out.shape[1 : half + 1]), math.prod(out.shape[half + 1 :])
        if self._is_compiled:
            self._weigh(pixels, width, height, out)
            return
        resized = self.resize(pixels, width, height).reshape(*out.shape[1:], 3)
        np.copyto(out, np.moveaxis(resized, -1, 0))

    @property
    def _is_compiled(self) -> bool:
        return native.compiled is not None and self.filter in weights.FILTERS

    def _weigh(self, pixels: Pixels, width: int, height: int, out: Array) -> None:
        if pixels.strides[1:] not in ((3, 1), (1, pixels.shape[0] * pixels.shape[1])):
            pixels = np.ascontiguousarray(pixels)
        rows, columns = pixels.shape[:2]
        across = weights.table(columns, width, self.filter, self.rule)
        down = weights.table(rows, height, self.filter, self.rule)
        if self.rule == "pillow" and _is_down_first(pixels, width, height):
            between: Array = np.empty((3, height, columns), np.uint8)
            native.compiled.resample(pixels, AS_IT_IS, down, between, native.variant)
            pixels, down = between.transpose(1, 2, 0), AS_IT_IS
        native.compiled.resample(pixels, across, down, out, native.variant)

    def _resized_by_others(self, pixels: Pixels, width: int, height: int) -> Pixels:
        mode = _MODES.get(Image.Resampling(self.filter))
        if mode is not None and self.rule == "torchvision":
            return _interpolate(pixels, width, height, mode)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling(self.filter))
        return np.asarray(image)


def by_rule(struct: S, rule: ResizeRule) -> S:
    """Return the same struct, with this rule for each `Resampling` in it."""
    if isinstance(struct, Resampling):
        return msgspec.structs.replace(struct, rule=rule)
    members = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    changed = {name: by_rule(each, rule) for name, each in members if isinstance(each, Struct)}
    return msgspec.structs.replace(struct, **changed) if changed else struct


def _is_down_first(pixels: Pixels, width: int, height: int) -> bool:
    """Return whether Pillow resizes the columns first.

    The order matters, because values are clipped to bytes in between. Pillow resizes rows first,
    unless most of the work is in the other direction.
    """
    rows, columns = pixels.shape[:2]
    return bool(height < rows and rows - height > 2 * (columns - width))


def load(struct: Struct) -> None:
    """Load all that the `Resampling`s in ``struct`` need, before a zygote forks."""
    if native.compiled is None:
        log.info("images are resized by libraries: the compiled part was not built")
    if needs_torch(struct):
        _load_torch()


def needs_torch(struct: Struct) -> bool:
    """Return whether torch resizes for one of the `Resampling`s in ``struct`` here."""
    return native.compiled is None and by_rule(struct, "pillow") != struct


@functools.cache
def _load_torch() -> Any:
    # Frontends and the supervisor import this module with a family, and lack the memory for torch.
    from torch.nn import functional

    return functional


def _interpolate(pixels: Pixels, width: int, height: int, mode: str) -> Pixels:
    """Resize by torch, as torchvision does for bytes."""
    if min(pixels.strides) < 0:
        pixels = np.ascontiguousarray(pixels)
    batch = as_tensor(pixels).permute(2, 0, 1)[None]
    try:
        interpolate = _load_torch().interpolate
        made = interpolate(batch, size=(height, width), mode=mode, antialias=True)
    except RuntimeError as error:  # torch's error for a lack of memory
        raise MemoryError from error
    resized: Pixels = made[0].permute(1, 2, 0).numpy()
    return resized
