"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: patches as in Qwen2-VL, of another size.

Their videos, which are written frame by frame with their times, are not supported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from afferent.errors import InvalidMedia
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import MediaTokens
from afferent.media.families.qwen_vl import QwenVlFamily, described_cut
from afferent.media.families.settings import CLIP_COLOURS, Defaults
from afferent.media.families.tokens import image_token_id

_MAX_ASPECT: Final = 200
_DEFAULTS: Final = {
    **CLIP_COLOURS,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000},
}
_PROCESSORS: Final[Defaults] = {
    "Glm4vImageProcessor": _DEFAULTS,
    "Glm46VImageProcessor": _DEFAULTS,
}
_IMAGE_TOKEN_ID: Final = {  # defaults of values that the configuration omits
    "glm4v": 151_343,
    "glm4v_moe": 151_363,
    "glm46v": 151_343,
    "glm_ocr": 59_280,
}


class GlmFamily(QwenVlFamily, tag="glm", frozen=True, kw_only=True):
    """Family of GLM's vision models.

    Limits are in pixels times ``temporal_patch_size``: an image counts as this many frames.
    """

    def bounded(self, max_pixels: int) -> Self:
        return super().bounded(max_pixels * self.temporal_patch_size)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the size as `QwenVlFamily.resized`; small images grow to a merged patch first.

        Raises:
            InvalidMedia: The aspect ratio is over 200.
        """
        unit, times = self.patch_size * self.merge_size, self.temporal_patch_size
        if min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise InvalidMedia("the image's sides differ by more than a factor of 200")
        fitted = [round(side / unit) * unit for side in (width, height)]
        if times * math.prod(fitted) > self.max_pixels:
            shrink = math.sqrt(times * height * width / self.max_pixels)
            fitted = [max(unit, int(side / shrink / unit) * unit) for side in (width, height)]
        elif times * math.prod(fitted) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (times * height * width))
            fitted = [math.ceil(side * grow / unit) * unit for side in (width, height)]
        return fitted[0], fitted[1]


def describe(folder: Path, config: Mapping[str, Any]) -> GlmFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    cut = described_cut(folder, _PROCESSORS)
    if cut is None:
        return None
    token_id = image_token_id(config, _IMAGE_TOKEN_ID[config["model_type"]])
    return GlmFamily(
        generation="qwen2",
        image=MediaTokens(token_id, token_id),
        **cut,
    )


ENTRY = Entry(
    model_types=tuple(_IMAGE_TOKEN_ID),
    describe=describe,
    engine=EngineFacts(
        position_features=frozenset({"image_grid_thw"}),
        compared_with={"vllm": ("glm4v", "glm4v_moe", "glm_ocr")},
    ),
)
