"""Gemma 3: a stretched image, written as its soft tokens between two marks and empty lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    processor_settings,
    whole_processor_settings,
)
from afferent.media.families.fixed import FixedFamily, framing
from afferent.media.families.images import num_tiles
from afferent.media.families.settings import (
    BILINEAR,
    PLAIN_COLOURS,
    SQUARE,
    Defaults,
    pixel_settings,
)
from afferent.media.families.tokens import between_marks, image_token_id

# Defaults of values that the configuration omits:
_BEGIN_ID, _END_ID, _SOFT_ID = 255_999, 256_000, 262_144
_NUM_EMBEDS = 256
_PROCESSORS: Final[Defaults] = {
    "Gemma3ImageProcessor": {**PLAIN_COLOURS, **SQUARE, "resample": BILINEAR},
}


def describe(folder: Path, config: Mapping[str, Any]) -> FixedFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    "Pan and scan", which adds crops of long images, is not supported.

    Raises:
        ConfigError: The folder does not define how images are processed, or its tokens.
    """
    settings = pixel_settings(processor_settings(folder), _PROCESSORS)
    frame = settings and framing(settings)
    if not frame:
        return None
    begin_id = config.get("boi_token_index", _BEGIN_ID)
    return FixedFamily(
        image=MediaTokens(marker=begin_id, embed=image_token_id(config, _SOFT_ID)),
        framing=frame,
        prompt=between_marks(
            folder,
            begin_id,
            config.get("eoi_token_index", _END_ID),
            whole_processor_settings(folder).get("image_seq_length", _NUM_EMBEDS),
        ),
    )


def _inputs_of_vllm(_: FixedFamily, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inputs, "num_patches": num_tiles(inputs)}


ENTRY = Entry(
    model_types=("gemma3",),
    describe=describe,
    engine=EngineFacts(
        items_see_themselves=True,
        compared_with={"vllm": ("gemma3",)},
        without_videos={"vllm": ("gemma3",)},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
