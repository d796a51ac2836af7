"""Llama 4: an image on the canvas of tiles that fits it best, and once more as a whole.

The model's processor normalizes in bfloat16, so that the engine's worker does, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np

from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    processor_settings,
    whole_processor_settings,
)
from afferent.media.families.images import PixelsFamily, decoded_image, image_header, num_tiles
from afferent.media.families.plan import FeaturePlan, Prompt
from afferent.media.families.settings import (
    BILINEAR,
    PLAIN_COLOURS,
    Defaults,
    pixel_settings,
    sides,
)
from afferent.media.families.tokens import added_tokens, image_token_id
from afferent.media.headers.probe import MediaHeader
from afferent.media.transforms.resize import Resampling
from afferent.media.transforms.tiles import write_tiles
from afferent.types import TensorSpec

_PROCESSORS: Final[Defaults] = {
    "Llama4ImageProcessor": {
        **PLAIN_COLOURS,
        "size": {"height": 336, "width": 336},
        "resample": BILINEAR,
    },
}
# Defaults of values that the folder omits:
_MAX_TILES, _PATCH_TOKEN_ID = 16, 200_092
_TOWER: Final = {"image_size": 448, "patch_size": 14, "pixel_shuffle_ratio": 0.5}
_WHOLE: Final = {"patch_size": 14, "pixel_shuffle_ratio": 0.5}
_IMAGE: Final = "<|image|>"
_BETWEEN, _ROW_END = "<|tile_x_separator|>", "<|tile_y_separator|>"
_TILES, _SHAPE = "pixel_values", "aspect_ratios"


class Llama4Family(PixelsFamily, tag="llama4", frozen=True, kw_only=True):
    """Tiles of ``side`` times ``side`` pixels, ``num_embeds`` tokens each.

    An image covers at most ``max_tiles`` of them. It is enlarged to one tile at most, unless
    ``is_enlarged``.
    """

    side: int
    max_tiles: int
    num_embeds: int
    is_enlarged: bool

    # The processor's floats are bfloat16, which numpy does not have.
    processor_inputs = None  # type: ignore[assignment]

    def plan(self, header: MediaHeader) -> FeaturePlan:
        header = image_header(header)
        rows, columns = self.grid(header.width, header.height)
        count = rows * columns
        count += count > 1  # the image as a whole
        specs = {
            _TILES: TensorSpec("uint8", (count, 3, self.side, self.side)),
            _SHAPE: TensorSpec("int64", (1, 2)),
        }
        return FeaturePlan(specs, self._prompt(rows, columns))

    def _prompt(self, rows: int, columns: int) -> Prompt:
        whole = (_IMAGE, self.num_embeds, "<|image_end|>")
        if rows == columns == 1:
            return (f"<|image_start|>{whole[0]}", *whole[1:])
        row = (self.num_embeds, _BETWEEN) * (columns - 1) + (self.num_embeds, _ROW_END)
        pieces: list[int | str] = ["<|image_start|>", *row * rows]
        pieces[-1] = _ROW_END + _IMAGE
        return (*pieces, *whole[1:])

    def bounded(self, max_pixels: int) -> Self:
        # The image as a whole is one tile more, unless there is only one.
        max_tiles = max(1, max_pixels // self.side**2 - 1)
        if self.max_tiles <= max_tiles:
            return self
        return msgspec.structs.replace(self, max_tiles=max_tiles)

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        image = decoded_image(media)
        width, height = image.header.width, image.header.height
        rows, columns = self.grid(width, height)
        tiles = out[_TILES]
        fitted = self.resampling.resize(image.pixels, *self.fitted(width, height, rows, columns))
        canvas = np.zeros((rows * self.side, columns * self.side, 3), np.uint8)
        canvas[: fitted.shape[0], : fitted.shape[1]] = fitted
        write_tiles(canvas, tiles[: rows * columns])
        if len(tiles) > 1:
            self.resampling.write(image.pixels, tiles[-1])
        out[_SHAPE][0] = rows, columns

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        scaled = features[_TILES].bfloat16() * self.normalization.rescale_factor
        mean, std = self.normalization.constants(scaled)
        return {**features, _TILES: scaled.sub_(mean).div_(std).float()}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles for an image of this size.

        The canvas that enlarges the image least, or else the one that shrinks it least; of equal
        ones, the smallest.
        """
        # In float32, as the processor computes: its scales may be equal where ours would not be.
        sides = np.array(self._grids(), np.float32) * self.side
        scales = (sides / np.array([height, width], np.float32)).min(axis=1)
        enlarging = scales[scales >= 1]
        if not len(enlarging):
            chosen = scales.max()
        else:
            chosen = enlarging.max() if self.is_enlarged else enlarging.min()
        fitting = [
            grid for grid, scale in zip(self._grids(), scales, strict=True) if scale == chosen
        ]
        return min(fitting, key=math.prod)

    def _grids(self) -> list[tuple[int, int]]:
        """Return rows and columns of the canvases, in the order in which the first one counts."""
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.max_tiles, 0, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    columns = count // rows
                    by_ratio.setdefault(rows / columns, []).append((rows, columns))
        return [grid for grids in by_ratio.values() for grid in grids]

    def fitted(self, width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
        """Return width and height of the image on its canvas, in its own aspect ratio."""
        wide, by_width = self._scaled(width, columns * self.side)
        high, by_height = self._scaled(height, rows * self.side)
        # A tensor and a number compare in the type of the tensor.
        kind = np.float32 if np.float32 in (type(by_width), type(by_height)) else np.float64
        if kind(by_width) < kind(by_height):
            return wide, max(1, min(_times(height, by_width), high))
        return max(1, min(_times(width, by_height), wide)), high

    def _scaled(self, side: int, most: int) -> tuple[int, float | np.float32]:
        """Return the length of a side on a canvas of this length, if the other one fits, too; and
        its scale: in float32 where the processor has the length in a tensor.
        """
        length = max(side, self.side)
        if self.is_enlarged or length > most:
            return most, np.float32(most) / np.float32(side)
        return length, length / side


def _times(side: int, scale: float | np.float32) -> int:
    """Return the whole part of ``side * scale``, multiplied in the type of ``scale``."""
    return math.floor(type(scale)(side) * scale)


def describe(folder: Path, config: Mapping[str, Any]) -> Llama4Family | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed, or has no tokenizer.
    """
    given = processor_settings(folder)
    settings = pixel_settings(given, _PROCESSORS)
    if settings is None or not (settings.do_resize and settings.do_rescale):
        return None
    square, tower = sides(settings.size), {**_TOWER, **(config.get("vision_config") or {})}
    whole = {**_WHOLE, **whole_processor_settings(folder)}
    is_of_tower = all(whole[name] == tower[name] for name in _WHOLE)
    normalization = settings.normalization if settings.do_normalize else None
    if normalization is None or not is_of_tower or square != (tower["image_size"],) * 2:
        return None
    ids = {text: token_id for token_id, text in added_tokens(folder).items()}
    if _IMAGE not in ids:
        return None
    shuffled = round(1 / tower["pixel_shuffle_ratio"] ** 2)
    return Llama4Family(
        image=MediaTokens(marker=ids[_IMAGE], embed=image_token_id(config, _PATCH_TOKEN_ID)),
        side=square[0],
        max_tiles=given.get("max_patches") or _MAX_TILES,
        num_embeds=(square[0] // tower["patch_size"]) ** 2 // shuffled,
        is_enlarged=bool(given.get("resize_to_max_canvas")),
        resampling=Resampling(settings.resample),
        normalization=normalization,
    )


def _inputs_of_vllm(_: Llama4Family, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inputs, "patches_per_image": num_tiles(inputs)}


ENTRY = Entry(
    model_types=("llama4",),
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": ("llama4",)},
        without_videos={"vllm": ("llama4",)},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
