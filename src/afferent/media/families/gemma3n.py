"""Gemma 3n: a stretched image, written as its soft tokens between two marks and empty lines."""

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
from afferent.media.families.settings import pixel_settings
from afferent.media.families.tokens import between_marks

# Defaults of values that the configuration omits:
_BEGIN_ID, _END_ID, _SOFT_ID = 255_999, 262_144, 262_145
_NUM_EMBEDS: Final = 256


def describe(folder: Path, config: Mapping[str, Any]) -> FixedFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed, or its tokens.
    """
    settings = pixel_settings(processor_settings(folder))
    frame = settings and framing(settings)
    if not frame:
        return None
    soft_id = config.get("image_token_id", _SOFT_ID)
    return FixedFamily(
        image=MediaTokens(marker=soft_id, embed=soft_id),
        framing=frame,
        prompt=between_marks(
            folder,
            config.get("boi_token_id", _BEGIN_ID),
            config.get("eoi_token_id", _END_ID),
            whole_processor_settings(folder).get("image_seq_length", _NUM_EMBEDS),
        ),
    )


ENTRY = Entry(
    model_types=("gemma3n",),
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": ("gemma3n",)},
        without_videos={"vllm": ("gemma3n",)},
    ),
)
