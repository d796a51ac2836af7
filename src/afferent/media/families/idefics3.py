"""Idefics3 and SmolVLM: an image resized to whole tiles, and once more as a whole.

Each tile has a name in the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    processor_settings,
    whole_processor_settings,
)
from afferent.media.families.images import LaidOutFamily, decoded_image, num_tiles
from afferent.media.families.plan import FeaturePlan, Prompt
from afferent.media.families.settings import PLAIN_COLOURS, Defaults, pixel_settings
from afferent.media.families.tokens import image_token_id, named_tokens
from afferent.media.headers.probe import ImageHeader
from afferent.media.transforms.normalize import Arithmetic
from afferent.media.transforms.resize import Resampling
from afferent.media.transforms.tiles import write_tiles
from afferent.types import TensorSpec

_LANCZOS: Final = 1  # Pillow's number
_LONGEST: Final = 4096
"""The processor resizes longer sides once more."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    **PLAIN_COLOURS,
    "resample": _LANCZOS,
    "size": {"longest_edge": 4 * 364},
}
_PROCESSORS: Final[Defaults] = {
    "Idefics3ImageProcessor": _DEFAULTS,
    "SmolVLMImageProcessor": _DEFAULTS,
}
# Defaults of values that the folder omits:
_SIDE, _NUM_EMBEDS, _IMAGE_TOKEN_ID = 364, 169, 128_257
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_TOWER: Final = {"image_size": 224, "patch_size": 32}


class Idefics3Family(LaidOutFamily, tag="idefics3", frozen=True, kw_only=True):
    """Tiles of ``side`` times ``side`` pixels, ``num_embeds`` tokens each.

    An image's longer side is resized to ``longest_edge``. If ``is_cut``, the image is cut into
    tiles then. ``around`` is written around a tile, and ``whole`` before the image as a whole.
    """

    side: int
    longest_edge: int
    is_cut: bool
    num_embeds: int
    around: str
    whole: str

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        image = decoded_image(media)
        resize, tiles = self.resampling.resize, out["pixel_values"][0]
        rows, columns = self.grid(image.header)
        # Each of these steps rounds to bytes, as the processor's own do.
        pixels = resize(image.pixels, *self._first(image.header))
        pixels = resize(pixels, columns * self.side, rows * self.side)
        if len(tiles) > 1:
            write_tiles(pixels, tiles[:-1])
            pixels = resize(pixels, self.side, self.side)
        tiles[-1] = pixels.transpose(2, 0, 1)

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        inputs = super().model_inputs(features)
        tiles = features["pixel_values"]
        # Equal tiles need no padding.
        seen = tiles.new_ones(()).long()
        inputs["pixel_attention_mask"] = seen.expand(*tiles.shape[:2], self.side, self.side)
        return inputs

    def processor_inputs(
        self, features: Mapping[str, Array], arithmetic: Arithmetic
    ) -> dict[str, Array]:
        inputs = super().processor_inputs(features, arithmetic)
        shape = (*features["pixel_values"].shape[:2], self.side, self.side)
        inputs["pixel_attention_mask"] = np.ones(shape, np.int64)
        return inputs

    def grid(self, header: ImageHeader) -> tuple[int, int]:
        """Return rows and columns of tiles."""
        if not self.is_cut:
            return 1, 1
        width, height = self._first(header)
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            return math.ceil(int(columns * self.side / aspect) / self.side), columns
        rows = math.ceil(height / self.side)
        return rows, math.ceil(int(rows * self.side * aspect) / self.side)

    def _first(self, header: ImageHeader) -> tuple[int, int]:
        """Return width and height: the longer side at its target, the other one even."""
        aspect, edge = header.width / header.height, self.longest_edge
        if header.width >= header.height:
            return edge, max(1, _even(int(edge / aspect)))
        return max(1, _even(int(edge * aspect))), edge

    def laid_out(self, header: ImageHeader, dtype: str) -> FeaturePlan:
        rows, columns = self.grid(header)
        num_tiles = rows * columns
        num_tiles += num_tiles > 1  # the image as a whole
        specs = {"pixel_values": TensorSpec(dtype, (1, num_tiles, 3, self.side, self.side))}
        return FeaturePlan(specs, self._prompt(rows, columns))

    def _prompt(self, rows: int, columns: int) -> Prompt:
        end = (f"{self.around}{self.whole}", self.num_embeds, self.around)
        if rows == columns == 1:
            return end
        pieces: list[int | str] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                break_ = "\n" if column == 1 < row else ""
                pieces += [f"{break_}{self.around}<row_{row}_col_{column}>", self.num_embeds]
        return (*pieces, "\n\n" + end[0], *end[1:])


def _even(side: int) -> int:
    return side + side % 2


def describe(folder: Path, config: Mapping[str, Any]) -> Idefics3Family | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    given = processor_settings(folder)
    settings = pixel_settings(given, _PROCESSORS)
    if settings is None or settings.normalization is None or not settings.do_resize:
        return None
    size = settings.size if isinstance(settings.size, dict) else {}
    edge, side = size.get("longest_edge"), (given.get("max_image_size") or {}).get("longest_edge")
    side = side or _SIDE
    # With a remainder, the number of tiles and that of their names may differ.
    if not edge or edge > _LONGEST or edge % side:
        return None
    num_embeds = whole_processor_settings(folder).get("image_seq_len") or _NUM_EMBEDS
    if num_embeds != _embeds_of(config, side):
        return None
    # Idefics3's names are fixed, SmolVLM's are the tokenizer's.
    names = named_tokens(folder) if config["model_type"] == "smolvlm" else {}
    token_id = image_token_id(config, _IMAGE_TOKEN_ID)
    return Idefics3Family(
        image=MediaTokens(token_id, token_id),
        side=side,
        longest_edge=edge,
        is_cut=bool(given.get("do_image_splitting", True)),
        num_embeds=num_embeds,
        around=names.get("fake_image_token", _AROUND),
        whole=names.get("global_image_token", _WHOLE),
        resampling=Resampling(settings.resample),
        normalization=settings.normalization,
    )


def _embeds_of(config: Mapping[str, Any], side: int) -> int:
    """Return the number of the model's embeddings of a tile; 0 if its tiles have another size."""
    tower = {**_TOWER, **(config.get("vision_config") or {})}
    if tower["image_size"] != side:
        return 0
    return int((side // tower["patch_size"]) ** 2 / config.get("scale_factor", 2) ** 2)


def _inputs_of_vllm(_: Idefics3Family, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inputs, "num_patches": num_tiles(inputs)}


_TYPES = ("idefics3", "smolvlm")
ENTRY = Entry(
    model_types=_TYPES,
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": _TYPES},
        without_videos={"vllm": _TYPES},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
