"""LLaVA, with the image processors of CLIP and SigLIP; with a tower of Pixtral it is Pixtral."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from afferent.media.families import pixtral
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import (
    MediaTokens,
    processor_settings,
    whole_processor_settings,
)
from afferent.media.families.fixed import FixedFamily, framing
from afferent.media.families.pixtral import PixtralFamily
from afferent.media.families.settings import pixel_settings
from afferent.media.families.tokens import image_token_id

_IMAGE_TOKEN_ID = 32_000  # default if the configuration omits it


def describe(folder: Path, config: Mapping[str, Any]) -> FixedFamily | PixtralFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how images are processed.
    """
    if (config.get("vision_config") or {}).get("model_type") == "pixtral":
        return pixtral.describe(folder, config)
    settings = pixel_settings(processor_settings(folder))
    frame = settings and framing(settings)
    num_embeds = frame and _num_embeds(folder, frame.width, frame.height)
    if not frame or not num_embeds:
        return None
    token_id = image_token_id(config, _IMAGE_TOKEN_ID)
    tokens = MediaTokens(token_id, token_id)
    return FixedFamily(image=tokens, framing=frame, prompt=(num_embeds,))


def _num_embeds(folder: Path, width: int, height: int) -> int | None:
    """Return the number of patches, with the tower's additional tokens.

    With the strategy ``default`` it is one less. ``None`` if the processor's file omits the patch
    size: `transformers` needs it too.
    """
    processor = whole_processor_settings(folder)
    if not (patch_size := processor.get("patch_size")):
        return None
    num_embeds: int = (width // patch_size) * (height // patch_size)
    num_embeds += processor.get("num_additional_image_tokens") or 0
    return num_embeds - (processor.get("vision_feature_select_strategy") == "default")


ENTRY: Final[Entry[FixedFamily | PixtralFamily]] = Entry(
    model_types=("llava",),
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": ("llava",)},
        without_videos={"vllm": ("llava",)},
    ),
)
