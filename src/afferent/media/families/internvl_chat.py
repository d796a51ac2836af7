"""InternVL in its own format: its chat template marks an image with plain text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct, ValidationError, convert

from afferent.errors import ConfigError
from afferent.media.decoded import Array
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import NO_TOKEN, MediaTokens
from afferent.media.families.images import num_tiles
from afferent.media.families.internvl import BEGIN, END, TiledFamily
from afferent.media.families.settings import BICUBIC
from afferent.media.families.tokens import added_tokens
from afferent.media.transforms.normalize import Arithmetic, Normalization
from afferent.media.transforms.resize import Resampling, ResizeRule
from afferent.types import Positive

_MARKER, _EMBED = "<image>", "<IMG_CONTEXT>"
_COLOURS: Final = Normalization(
    rescale_factor=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)


class _Tower(Struct):
    image_size: Positive
    patch_size: Positive


class _Settings(Struct):
    """The settings of images in ``config.json``. None has a default: it depends on the release."""

    vision_config: _Tower
    min_dynamic_patch: int
    max_dynamic_patch: int
    dynamic_image_size: bool
    use_thumbnail: bool
    downsample_ratio: float
    force_image_size: int | None = None

    @property
    def num_embeds(self) -> int:
        side = self.vision_config.image_size // self.vision_config.patch_size
        return int(side**2 * self.downsample_ratio**2)


class InternVlChatFamily(TiledFamily, tag="internvl_chat", frozen=True, kw_only=True):
    """Tiles as `TiledFamily` cuts them, resized and normalized as by Pillow and torchvision."""

    def resizing(self, rule: ResizeRule) -> Self:
        return self

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        floats = features["pixel_values"].float().div_(255)
        mean, std = self.normalization.constants(floats)
        return {**features, "pixel_values": floats.sub_(mean).div_(std)}

    def processor_inputs(
        self, features: Mapping[str, Array], arithmetic: Arithmetic
    ) -> dict[str, Array]:
        return super().processor_inputs(features, "stepwise")

    def _grids(self) -> list[tuple[int, int]]:
        # In the order of a set, as in the original: the first of equally near ones counts.
        limit = self.max_tiles + 1
        grids = {
            (columns, rows)
            for number in range(self.min_tiles, limit)
            for columns in range(1, number + 1)
            for rows in range(1, number + 1)
            if self.min_tiles <= columns * rows < limit
        }
        return sorted(grids, key=math.prod)


def describe(folder: Path, config: Mapping[str, Any]) -> InternVlChatFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here, or if its
    tokenizer is code of the checkpoint.
    """
    try:
        settings, texts = convert(config, _Settings), added_tokens(folder)
    except (ValidationError, ConfigError):
        return None
    side, ids = settings.vision_config.image_size, {text: each for each, text in texts.items()}
    if not {BEGIN, END, _EMBED} <= {*ids} or settings.force_image_size not in (None, side):
        return None
    is_cut = settings.dynamic_image_size
    return InternVlChatFamily(
        image=MediaTokens(NO_TOKEN, ids[_EMBED], _MARKER),
        width=side,
        height=side,
        min_tiles=settings.min_dynamic_patch if is_cut else 1,
        max_tiles=settings.max_dynamic_patch if is_cut else 1,
        has_whole=settings.use_thumbnail,
        num_embeds=settings.num_embeds,
        begin=BEGIN,
        end=END,
        resampling=Resampling(BICUBIC),
        normalization=_COLOURS,
    )


def _inputs_of_vllm(family: InternVlChatFamily, inputs: Mapping[str, Any]) -> dict[str, Any]:
    count = num_tiles(inputs)
    return {
        "pixel_values_flat": inputs["pixel_values"],
        "image_num_patches": count,
        "image_token_id": count.new_tensor(family.image.embed),
    }


_TYPES = ("internvl_chat",)
ENTRY = Entry(
    model_types=_TYPES,
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": _TYPES},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
