"""LLaVA-NeXT and LLaVA-OneVision: an image as a whole, and in tiles of its best resolution.

The model drops the tiles' rows that show nothing of the image. Each remaining row ends with a mark,
so that the number of embeddings follows the image's own size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    processor_settings,
    whole_processor_settings,
)
from afferent.media.families.images import LaidOutFamily, decoded_image
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.settings import (
    CLIP_COLOURS,
    Defaults,
    PixelSettings,
    pixel_settings,
    sides,
)
from afferent.media.families.tokens import image_token_id
from afferent.media.headers.probe import ImageHeader
from afferent.media.transforms.resize import Resampling
from afferent.media.transforms.tiles import write_tiles
from afferent.types import TensorSpec

Resolutions = tuple[tuple[int, int], ...]
"""``(height, width)`` each."""

# Defaults of values that the folder omits:
_IMAGE_TOKEN_ID: Final = {"llava_next": 32_000, "llava_onevision": 151_646}
_TOWERS: Final = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
}
_STRATEGIES: Final = {"clip_vision_model": "default", "siglip_vision_model": "full"}
"""For each tower, the strategy that keeps a row for each patch of a tile."""
_RESOLUTIONS: Final[Mapping[str, Resolutions]] = {
    "llava_next": ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
    "llava_onevision": tuple(
        (384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)
    ),
}
_PROCESSORS: Final[Defaults] = {
    "LlavaNextImageProcessor": {
        **CLIP_COLOURS,
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "LlavaOnevisionImageProcessor": {**CLIP_COLOURS, "size": {"height": 384, "width": 384}},
}
_MOST_OF_ONEVISION: Final = ("anyres_max_9", 9)
_SMALLER_FROM: Final = 1.1


class AnyResolutionFamily(LaidOutFamily, tag="any_resolution", frozen=True, kw_only=True):
    """Tiles of ``side`` times ``side`` pixels, ``grid`` times ``grid`` embeddings.

    ``most_tiles`` limits the embeddings of all tiles to this many tiles' worth; 0: no limit.
    """

    side: int
    grid: int
    resolutions: Resolutions
    most_tiles: int

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        image = decoded_image(media)
        header, tiles = image.header, out["pixel_values"][0]
        self.resampling.write(image.pixels, tiles[0])
        height, width = self.resolution(header)
        fitted = self.resampling.resize(image.pixels, *_fitted(header, height, width))
        top, left = (height - fitted.shape[0]) // 2, (width - fitted.shape[1]) // 2
        padded = np.zeros((height, width, 3), np.uint8)
        padded[top : top + fitted.shape[0], left : left + fitted.shape[1]] = fitted
        write_tiles(padded, tiles[1:])
        out["image_sizes"][0] = header.height, header.width

    def resolution(self, header: ImageHeader) -> tuple[int, int]:
        """Return height and width of the resolution that shows most of an image.

        Of several such, it wastes least.

        Raises:
            InvalidMedia: The image is too narrow for any.
        """
        best, most_shown, least_wasted = (0, 0), 0, math.inf
        for height, width in self.resolutions:
            scale = min(width / header.width, height / header.height)
            shown = int(header.width * scale) * int(header.height * scale)
            shown = min(shown, header.width * header.height)
            wasted = height * width - shown
            if shown > most_shown or (shown == most_shown and wasted < least_wasted):
                best, most_shown, least_wasted = (height, width), shown, wasted
        if not most_shown:
            raise InvalidMedia("the image is too narrow for the model")
        return best

    def laid_out(self, header: ImageHeader, dtype: str) -> FeaturePlan:
        height, width = self.resolution(header)
        rows, columns = height // self.side, width // self.side
        specs = {
            "pixel_values": TensorSpec(dtype, (1, 1 + rows * columns, 3, self.side, self.side)),
            "image_sizes": TensorSpec("int64", (1, 2)),
        }
        num_embeds = self.grid**2 + self._num_in_tiles(header, rows, columns)
        return FeaturePlan(specs, (num_embeds,))

    def _num_in_tiles(self, header: ImageHeader, rows: int, columns: int) -> int:
        """Return the number of embeddings that show the image, within the limit, with marks."""
        high, wide = rows * self.grid, columns * self.grid
        if header.width / header.height > wide / high:
            seen = int(round(header.height * (wide / header.width), 7))
            high -= (high - seen) // 2 * 2
        else:
            seen = int(round(header.width * (high / header.height), 7))
            wide -= (wide - seen) // 2 * 2
        if self.most_tiles:
            ratio = math.sqrt(high * wide / (self.most_tiles * self.grid**2))
            if ratio > _SMALLER_FROM:
                high, wide = int(high // ratio), int(wide // ratio)
        return high * (wide + 1)


def _fitted(header: ImageHeader, height: int, width: int) -> tuple[int, int]:
    """Return the width and height of an image fitted into this size."""
    by_width, by_height = width / header.width, height / header.height
    if by_width < by_height:
        return width, min(math.ceil(header.height * by_width), height)
    return min(math.ceil(header.width * by_height), width), height


def describe(folder: Path, config: Mapping[str, Any]) -> AnyResolutionFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    given, model_type = processor_settings(folder), str(config["model_type"])
    settings = pixel_settings(given, _PROCESSORS)
    if settings is None or settings.normalization is None or not settings.do_resize:
        return None
    side = _side(settings)
    grid = _grid(config, side)
    resolutions = _resolutions(given, model_type)
    is_onevision = model_type == "llava_onevision"
    if not side or not grid or resolutions != _resolutions(config, model_type):
        return None
    if any(each % side for pair in resolutions for each in pair):
        return None
    if is_onevision and not _keeps_to(_MOST_OF_ONEVISION[0], folder, config):
        return None
    token_id = image_token_id(config, _IMAGE_TOKEN_ID[model_type])
    return AnyResolutionFamily(
        image=MediaTokens(token_id, token_id),
        side=side,
        grid=grid,
        resolutions=resolutions,
        most_tiles=_MOST_OF_ONEVISION[1] if is_onevision else 0,
        resampling=Resampling(settings.resample),
        normalization=settings.normalization,
    )


def _side(settings: PixelSettings) -> int:
    """Return the side of a tile; 0 if tiles are changed after they were cut."""
    size = settings.size if isinstance(settings.size, dict) else {}
    side = size.get("shortest_edge") or 0
    if both := sides(settings.size):
        side = both[0] if both[0] == both[1] else 0
    cut = sides(settings.crop_size)
    return side if cut in (None, (side, side)) else 0


def _grid(config: Mapping[str, Any], side: int) -> int:
    """Return the embeddings along a tile's side; 0 if the tower gives others."""
    given = config.get("vision_config") or {}
    kind = given.get("model_type")
    if kind not in _TOWERS:
        return 0
    tower = {**_TOWERS[kind], **given}
    usual = "full" if config["model_type"] == "llava_onevision" else "default"
    strategy = config.get("vision_feature_select_strategy", usual)
    if tower["image_size"] != side or strategy != _STRATEGIES[kind]:
        return 0
    return int(side // tower["patch_size"])


def _resolutions(given: Mapping[str, Any], model_type: str) -> Resolutions:
    listed = given.get("image_grid_pinpoints") or _RESOLUTIONS[model_type]
    return tuple((int(height), int(width)) for height, width in listed)


def _keeps_to(limit: str, folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether model and processor have the limit that engines assume."""
    said = (config, whole_processor_settings(folder))
    return all(each.get("vision_aspect_ratio", limit) == limit for each in said)


_TYPES = tuple(_RESOLUTIONS)
ENTRY = Entry(
    model_types=_TYPES,
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": _TYPES},
        without_videos={"vllm": ("llava_next",)},
    ),
)
