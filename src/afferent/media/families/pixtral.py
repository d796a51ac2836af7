"""Pixtral, Mistral 3 and LightOnOCR: patches of an image at nearly its own size, row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    ProcessorLayout,
    processor_settings,
    whole_processor_settings,
)
from afferent.media.families.images import LaidOutFamily, decoded_image
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.settings import CLIP_COLOURS, Defaults, pixel_settings
from afferent.media.families.tokens import image_token_id
from afferent.media.headers.probe import ImageHeader
from afferent.media.transforms.resize import Resampling
from afferent.types import TensorSpec

_PROCESSORS: Final[Defaults] = {
    "PixtralImageProcessor": {**CLIP_COLOURS, "size": {"longest_edge": 1024}},
}
# Defaults of values that the folder omits:
_PATCH, _LONGEST_EDGE = 16, 1024
_MERGE: Final = {"llava": 1, "mistral3": 2, "lighton_ocr": 2}
_IMAGE_TOKEN_ID: Final = {"llava": 32_000, "mistral3": 10, "lighton_ocr": 151_655}
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class PixtralFamily(LaidOutFamily, tag="pixtral", frozen=True, kw_only=True):
    """Family of Pixtral's encoder.

    ``unit`` times ``unit`` pixels become an embedding. No side exceeds ``longest_edge``, except to
    become a multiple of ``step``. ``row_end`` is written after each row and ``end`` after the last
    one; LightOnOCR has neither.
    """

    unit: int
    step: int
    longest_edge: int
    row_end: str
    end: str

    @property
    def processor_layout(self) -> ProcessorLayout:
        layout = super().processor_layout
        return ProcessorLayout(plan=layout.plan, arguments={"patch_size": self.step})

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        image = decoded_image(media)
        height, width = self.size(image.header)
        self.resampling.write(image.pixels, out["pixel_values"][0])
        out["image_sizes"][0] = height, width

    def size(self, header: ImageHeader) -> tuple[int, int]:
        """Return the height and width of a resized image.

        Raises:
            InvalidMedia: The image is too narrow.
        """
        height, width = header.height, header.width
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not (height and width):
            raise InvalidMedia("the image is too narrow for the model")
        return math.ceil(height / self.step) * self.step, math.ceil(width / self.step) * self.step

    def laid_out(self, header: ImageHeader, dtype: str) -> FeaturePlan:
        height, width = self.size(header)
        specs = {
            "pixel_values": TensorSpec(dtype, (1, 3, height, width)),
            "image_sizes": TensorSpec("int64", (1, 2)),
        }
        rows, columns = height // self.unit, width // self.unit
        if not self.row_end:
            return FeaturePlan(specs, (rows * columns,))
        return FeaturePlan(specs, (columns, self.row_end) * (rows - 1) + (columns, self.end))


def describe(folder: Path, config: Mapping[str, Any]) -> PixtralFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    given = dict(processor_settings(folder))
    own_step = given.pop("patch_size", None)
    settings = pixel_settings(given, _PROCESSORS)
    if settings is None or settings.normalization is None or not settings.do_resize:
        return None
    size = settings.size if isinstance(settings.size, dict) else {}
    edge = size.get("longest_edge")
    whole, model_type = whole_processor_settings(folder), str(config["model_type"])
    unit = whole.get("patch_size", _PATCH) * whole.get("spatial_merge_size", 1)
    if not edge or settings.do_center_crop or (unit, edge) != _expected(config, edge):
        return None
    is_page = model_type == "lighton_ocr"
    token_id = image_token_id(config, _IMAGE_TOKEN_ID[model_type])
    return PixtralFamily(
        image=MediaTokens(token_id, token_id),
        unit=unit,
        # For the others the whole processor's value counts, which it passes on.
        step=_side(own_step) if is_page else unit,
        longest_edge=edge,
        row_end="" if is_page else whole.get("image_break_token", _BREAK),
        end="" if is_page else whole.get("image_end_token", _END),
        resampling=Resampling(settings.resample),
        normalization=settings.normalization,
    )


def _side(patch_size: Any) -> int:
    """Return the side of a patch by the image processor."""
    given = patch_size or _PATCH
    return int(given["height"] if isinstance(given, dict) else given)


def _expected(config: Mapping[str, Any], edge: int) -> tuple[int, int]:
    """Return the pixels along an embedding's side, and the longest edge, by the model.

    LLaVA uses the tower's own values.
    """
    tower, model_type = config.get("vision_config") or {}, str(config["model_type"])
    unit = tower.get("patch_size", _PATCH) * config.get("spatial_merge_size", _MERGE[model_type])
    is_llava = model_type == "llava"
    return unit, tower.get("image_size", _LONGEST_EDGE) if is_llava else edge


ENTRY = Entry(
    model_types=("mistral3", "lighton_ocr"),
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": ("mistral3",)},
        without_videos={"vllm": ("mistral3",)},
    ),
)
