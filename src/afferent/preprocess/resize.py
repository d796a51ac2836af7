"""Resizing pixels as torchvision does, or Pillow, straight to where they belong; in workers only.

A model's own processor resizes by torchvision where that is installed, as it is beside vLLM, and by
Pillow elsewhere. The compiled part gives the bytes of either. Where it could not be built
(`docs/adr/0034`), Pillow itself resizes by Pillow's rule, and torch by torchvision's. The bytes are
the same in each case, so features of one key do not depend on how a node was installed
(`docs/adr/0040`).
"""

from __future__ import annotations

import functools
import logging
import math
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from afferent.preprocess import weights
from afferent.preprocess.media import Array, Pixels
from afferent.preprocess.weights import AS_IT_IS, Rule
from afferent.store.block.torch_tensors import as_tensor

log = logging.getLogger(__name__)

compiled: ModuleType | None
"""``None`` where it could not be built."""
try:
    from afferent.preprocess import _native

    compiled = _native
except ImportError:
    compiled = None

_MODES = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}

S = TypeVar("S", bound=Struct)

ResizeRule = Rule
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
        if not self._is_compiled:
            return self._resized_by_others(pixels, width, height)
        out: Array = np.empty((3, height, width), np.uint8)
        self.write(pixels, out)
        return out.transpose(1, 2, 0)

    def write(self, pixels: Pixels, out: Array) -> None:
        """Resize pixels into ``out``, with no picture in between where that can be.

        Args:
            pixels: As for `resize`.
            out: ``(3, rows ..., columns ...)``: a view of what is to be written, in which each side
                may be cut into as many dimensions as the other.
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
        return compiled is not None and self.filter in weights.FILTERS

    def _weigh(self, pixels: Pixels, width: int, height: int, out: Array) -> None:
        if pixels.strides[1:] not in ((3, 1), (1, pixels.shape[0] * pixels.shape[1])):
            pixels = np.ascontiguousarray(pixels)
        rows, columns = pixels.shape[:2]
        across = weights.table(columns, width, self.filter, self.rule)
        down = weights.table(rows, height, self.filter, self.rule)
        if self.rule == "pillow" and _is_down_first(pixels, width, height):
            between: Array = np.empty((3, height, columns), np.uint8)
            _native.resample(pixels, AS_IT_IS, down, between)
            pixels, down = between.transpose(1, 2, 0), AS_IT_IS
        _native.resample(pixels, across, down, out)

    def _resized_by_others(self, pixels: Pixels, width: int, height: int) -> Pixels:
        mode = _MODES.get(Image.Resampling(self.filter))
        if mode is not None and self.rule == "torchvision":
            return _interpolate(pixels, width, height, mode)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling(self.filter))
        return np.asarray(image)


def by_rule(struct: S, rule: ResizeRule) -> S:
    """The same struct, where each `Resampling` in it follows this rule."""
    if isinstance(struct, Resampling):
        return msgspec.structs.replace(struct, rule=rule)
    members = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    changed = {name: by_rule(each, rule) for name, each in members if isinstance(each, Struct)}
    return msgspec.structs.replace(struct, **changed) if changed else struct


def _is_down_first(pixels: Pixels, width: int, height: int) -> bool:
    """Which direction goes first matters: values are clipped to bytes in between. Pillow begins
    with the rows' own, unless most of the work is in the other.
    """
    rows, columns = pixels.shape[:2]
    return bool(height < rows and rows - height > 2 * (columns - width))


def load(struct: Struct) -> None:
    """Load what the `Resampling`s in ``struct`` will need; a zygote calls this so that its forks
    have it.
    """
    if compiled is None:
        log.info("images are resized by libraries: the compiled part was not built, or lacks AVX2")
    if needs_torch(struct):
        _load_torch()


def needs_torch(struct: Struct) -> bool:
    """Whether torch resizes for one of the `Resampling`s in ``struct`` here."""
    return compiled is None and by_rule(struct, "pillow") != struct


@functools.cache
def _load_torch() -> Any:
    # Frontends and the supervisor import this module with a family, and have no memory for torch.
    from torch.nn import functional

    return functional


def _interpolate(pixels: Pixels, width: int, height: int, mode: str) -> Pixels:
    """Resize by torch, which torchvision leaves bytes to."""
    if min(pixels.strides) < 0:
        pixels = np.ascontiguousarray(pixels)
    batch = as_tensor(pixels).permute(2, 0, 1)[None]
    try:
        interpolate = _load_torch().interpolate
        made = interpolate(batch, size=(height, width), mode=mode, antialias=True)
    except RuntimeError as error:  # torch's way to say that there is no memory
        raise MemoryError from error
    resized: Pixels = made[0].permute(1, 2, 0).numpy()
    return resized
