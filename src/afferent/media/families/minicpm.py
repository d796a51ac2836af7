"""MiniCPM-V 4.6: an image as a whole, and once more in slices of one size, all cut into patches.

Its prompt begins with the image's number in the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    ProcessorLayout,
    processor_settings,
)
from afferent.media.families.images import LaidOutFamily, decoded_image
from afferent.media.families.plan import NUMBER, FeaturePlan, Prompt
from afferent.media.families.settings import PLAIN_COLOURS, Defaults, pixel_settings
from afferent.media.families.tokens import added_tokens, named_tokens
from afferent.media.headers.probe import ImageHeader
from afferent.media.transforms.resize import Resampling
from afferent.media.transforms.tiles import write_patch_rows
from afferent.types import TensorSpec

_PROCESSORS: Final[Defaults] = {"MiniCPMV4_6ImageProcessor": {**PLAIN_COLOURS, "size": {}}}
# Defaults of values that the folder omits:
_SLICE_SIDE, _MAX_SLICES, _INSERT_LAYER = 448, 9, 6
_MERGED: Final = 4
"""Patches of a row or column that become one embedding."""
_PATCHES, _SIZES = "pixel_values", "target_sizes"
_TEXTS: Final = {
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_token": "<|image_pad|>",
}


class MiniCpmFamily(LaidOutFamily, tag="minicpmv4_6", frozen=True, kw_only=True):
    """Slices of about ``side`` times ``side`` pixels, and an image as a whole of about as many.

    A larger image is cut into at most ``max_slices``. A patch has ``patch_side`` pixels on each
    side; 16 of them become one embedding. ``merges_early``: in the middle of the encoder, four
    patches become one. ``around_number``, ``around_whole`` and ``around_slice`` are the texts
    before and after.
    """

    side: int
    max_slices: int
    patch_side: int
    merges_early: bool
    around_number: tuple[str, str]
    around_whole: tuple[str, str]
    around_slice: tuple[str, str]

    def laid_out(self, header: ImageHeader, dtype: str) -> FeaturePlan:
        patches = [self._num_patches(size) for size in self._sizes(header)]
        specs = {
            _PATCHES: TensorSpec(dtype, (1, 3, self.patch_side, sum(patches) * self.patch_side)),
            _SIZES: TensorSpec("int32", (len(patches), 2)),
        }
        return FeaturePlan(specs, self._prompt(header, patches))

    @property
    def processor_layout(self) -> ProcessorLayout:
        layout = super().processor_layout
        return ProcessorLayout(plan=layout.plan, arguments={"max_slice_nums": self.max_slices})

    def _prompt(self, header: ImageHeader, patches: list[int]) -> Prompt:
        rows, columns = self.grid(header)
        numbers = [each // _MERGED**2 for each in patches]
        (begin, end), (slice_begin, slice_end) = self.around_whole, self.around_slice
        pieces: list[int | str] = [NUMBER.join(self.around_number) + begin, numbers[0], end]
        for index in range(rows * columns):
            line = "\n" if index and index % columns == 0 else ""
            pieces[-1] = f"{pieces[-1]}{line}{slice_begin}"
            pieces += [numbers[index + 1], slice_end]
        return tuple(pieces)

    def bounded(self, max_pixels: int) -> Self:
        # The image as a whole is about one slice more.
        max_slices = max(1, max_pixels // self.side**2 - 1)
        if self.max_slices <= max_slices:
            return self
        return msgspec.structs.replace(self, max_slices=max_slices)

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        image = decoded_image(media)
        rows, columns = self.grid(image.header)
        whole, *slices = self._sizes(image.header)
        pixels, sizes = out[_PATCHES][0], out[_SIZES]
        shown = self.resampling.resize(image.pixels, *whole)
        end = write_patch_rows(shown, pixels, 0)
        if slices:
            width, height = slices[0]
            cut = self.resampling.resize(image.pixels, columns * width, rows * height)
            for top in range(0, rows * height, height):
                for left in range(0, columns * width, width):
                    end = write_patch_rows(
                        cut[top : top + height, left : left + width], pixels, end
                    )
        for row, (width, height) in zip(sizes, (whole, *slices), strict=True):
            row[:] = height // self.patch_side, width // self.patch_side

    def grid(self, header: ImageHeader) -> tuple[int, int]:
        """Return rows and columns of slices; zeros for an image that is not cut."""
        ratio = header.width * header.height / self.side**2
        most = min(math.ceil(ratio), self.max_slices)
        if most <= 1:
            return 0, 0
        aspect = math.log(header.width / header.height)
        best, least = (1, 1), math.inf
        for rows, columns in self._grids(most):
            apart = abs(aspect - math.log(columns / rows))
            if apart < least or (apart == least and rows > best[0]):
                best, least = (rows, columns), apart
        return best

    def _grids(self, most: int) -> Iterator[tuple[int, int]]:
        """Return the allowed grids, in the order in which the first of equal ones counts."""
        for count in range(most - 1, most + 2):
            if 1 < count <= self.max_slices:
                for rows in range(1, count + 1):
                    if count % rows == 0:
                        yield rows, count // rows

    def _sizes(self, header: ImageHeader) -> list[tuple[int, int]]:
        """Return width and height of the image as a whole, and of each slice."""
        rows, columns = self.grid(header)
        whole = self._fitted(header.width, header.height, is_enlarged=not rows)
        if not rows:
            return [whole]
        width = _nearest(header.width, columns) / columns
        height = _nearest(header.height, rows) / rows
        return [whole, *[self._fitted(width, height, is_enlarged=True)] * (rows * columns)]

    def _fitted(self, width: float, height: float, *, is_enlarged: bool) -> tuple[int, int]:
        """Return width and height in whole patches: about as many pixels as a slice, or fewer."""
        if is_enlarged or width * height > self.side**2:
            aspect = width / height
            height = int(self.side / math.sqrt(aspect))
            width = int(height * aspect)
        unit = self.patch_side * _MERGED
        return _nearest(width, unit), _nearest(height, unit)

    def _num_patches(self, size: tuple[int, int]) -> int:
        return (size[0] // self.patch_side) * (size[1] // self.patch_side)


def _nearest(length: float, unit: int) -> int:
    """Return the nearest multiple of ``unit``, at least one."""
    return max(round(length / unit) * unit, unit)


def describe(folder: Path, config: Mapping[str, Any]) -> MiniCpmFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed, or has no tokenizer.
    """
    given = processor_settings(folder)
    settings = pixel_settings(given, _PROCESSORS)
    if settings is None or settings.normalization is None or not settings.do_resize:
        return None
    # vLLM always cuts and numbers images. The sizes of the mode "4x" depend on the version of
    # transformers.
    is_usual = given.get("slice_mode", True) and given.get("use_image_id", True)
    is_usual = is_usual and given.get("downsample_mode", "16x") == "16x"
    texts = {**_TEXTS, **named_tokens(folder)}
    ids = {text: token_id for token_id, text in added_tokens(folder).items()}
    if not is_usual or not {texts[name] for name in _TEXTS} <= {*ids}:
        return None
    token_id = ids[texts["image_token"]]
    return MiniCpmFamily(
        image=MediaTokens(token_id, token_id),
        side=given.get("scale_resolution", _SLICE_SIDE),
        max_slices=given.get("max_slice_nums", _MAX_SLICES),
        patch_side=settings.patch_size,
        merges_early=config.get("insert_layer_id", _INSERT_LAYER) >= 0,
        around_number=(texts["image_id_start_token"], texts["image_id_end_token"]),
        around_whole=(texts["image_start_token"], texts["image_end_token"]),
        around_slice=(texts["slice_start_token"], texts["slice_end_token"]),
        resampling=Resampling(settings.resample),
        normalization=settings.normalization,
    )


def _inputs_of_vllm(family: MiniCpmFamily, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patches of each part in a row of its own, filled up with zeros."""
    (pixels,), sizes = inputs[_PATCHES], inputs[_SIZES].long()
    lengths = (sizes.prod(-1) * family.patch_side).tolist()
    rows = pixels.new_zeros((1, len(lengths), *pixels.shape[:-1], max(lengths)))
    for row, part in zip(rows[0], pixels.split(lengths, dim=-1), strict=True):
        row[..., : part.shape[-1]] = part
    merger = sizes.new_ones((1, 1)) == int(family.merges_early)
    return {_PATCHES: rows, "tgt_sizes": sizes[None], "use_vit_merger": merger}


_TYPES = ("minicpmv4_6",)
ENTRY = Entry(
    model_types=_TYPES,
    describe=describe,
    engine=EngineFacts(
        numbers_items=True,
        side_by_side=frozenset({_PATCHES}),
        compared_with={"vllm": _TYPES},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
