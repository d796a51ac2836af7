"""InternVL: an image stretched over a grid of square tiles, and once more as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import MediaTokens, processor_settings
from afferent.media.families.images import PixelsFamily, decoded_image, image_header, num_tiles
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.settings import CLIP_COLOURS, Defaults, pixel_settings, sides
from afferent.media.families.tokens import image_token_id, named_tokens
from afferent.media.headers.probe import MediaHeader
from afferent.media.transforms.resize import Resampling
from afferent.media.transforms.tiles import write_tiles
from afferent.types import TensorSpec

# Defaults of values that the configuration omits:
_IMAGE_TOKEN_ID, _NUM_EMBEDS = 151_667, 256
BEGIN, END = "<img>", "</img>"
_PROCESSORS: Final[Defaults] = {
    "GotOcr2ImageProcessor": {**CLIP_COLOURS, "size": {"height": 384, "width": 384}},
}


class TiledFamily(PixelsFamily, tag="tiled", frozen=True, kw_only=True):
    """Tiles of ``width`` times ``height`` pixels, ``num_embeds`` tokens each.

    ``has_whole``: an image of several tiles comes once more as a whole, in one.
    """

    width: int
    height: int
    min_tiles: int
    max_tiles: int
    has_whole: bool = True
    num_embeds: int
    begin: str
    end: str

    def plan(self, header: MediaHeader) -> FeaturePlan:
        header = image_header(header)
        num_tiles = math.prod(self.grid(header.width, header.height))
        num_tiles += self.has_whole and num_tiles > 1
        shape = (num_tiles, 3, self.height, self.width)
        prompt = (self.begin, num_tiles * self.num_embeds, self.end)
        return FeaturePlan({"pixel_values": TensorSpec("uint8", shape)}, prompt)

    def bounded(self, max_pixels: int) -> Self:
        # The image as a whole is one tile more, unless there is only one.
        max_tiles = max(1, max_pixels // (self.width * self.height) - self.has_whole)
        if self.max_tiles <= max_tiles:
            return self
        fewest = min(self.min_tiles, max_tiles)
        return msgspec.structs.replace(self, min_tiles=fewest, max_tiles=max_tiles)

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        image = decoded_image(media)
        columns, rows = self.grid(image.header.width, image.header.height)
        tiles = out["pixel_values"]
        size = columns * self.width, rows * self.height
        stretched = self.resampling.resize(image.pixels, *size)
        write_tiles(stretched, tiles[: columns * rows])
        if len(tiles) > columns * rows:
            self.resampling.write(image.pixels, tiles[-1])

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows for an image of this size, by the rule of the model family.

        The grid is nearest in aspect ratio. Of equally near ones, it is the largest that the image
        fills at least half of.
        """
        best, least = (1, 1), math.inf
        for columns, rows in self._grids():
            apart = abs(width / height - columns / rows)
            fills = 2 * width * height > columns * self.width * rows * self.height
            if apart < least or (apart == least and fills):
                best, least = (columns, rows), apart
        return best

    def _grids(self) -> list[tuple[int, int]]:
        """Return the allowed grids, smallest first; of equal size, the higher ones first."""
        most = range(1, self.max_tiles + 1)
        grids = [(columns, rows) for columns in most for rows in most]
        fitting = [grid for grid in grids if self.min_tiles <= math.prod(grid) <= self.max_tiles]
        return sorted(fitting, key=math.prod)


def describe(folder: Path, config: Mapping[str, Any]) -> TiledFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    settings = pixel_settings(processor_settings(folder), _PROCESSORS)
    if settings is None or settings.normalization is None or not settings.do_resize:
        return None
    size = sides(settings.size)
    if size is None or settings.do_center_crop or settings.do_pad:
        return None
    token_id, names = image_token_id(config, _IMAGE_TOKEN_ID), named_tokens(folder)
    return TiledFamily(
        image=MediaTokens(token_id, token_id),
        width=size[0],
        height=size[1],
        # The whole processor always requests tiles, even if the file sets `crop_to_patches`.
        min_tiles=settings.min_patches,
        max_tiles=settings.max_patches,
        num_embeds=config.get("image_seq_length", _NUM_EMBEDS),
        begin=names.get("start_image_token", BEGIN),
        end=names.get("end_image_token", END),
        resampling=Resampling(settings.resample),
        normalization=settings.normalization,
    )


def _inputs_of_vllm(family: TiledFamily, inputs: Mapping[str, Any]) -> dict[str, Any]:
    count = num_tiles(inputs)
    return {
        **inputs,
        "image_num_patches": count,
        "num_patches": count,
        "image_token_id": count.new_tensor(family.image.embed),
    }


_TYPES = ("internvl",)
ENTRY = Entry(
    model_types=_TYPES,
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": _TYPES},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
