"""Settings of an image or video processor, as `transformers` writes them to a model's folder.

An omitted setting has the default of the processor's class. The classes that several families use
are here; a family adds those of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from afferent.media.transforms.normalize import NO_MEAN, NO_STD, Normalization

Size = dict[str, int | None]
_Colour = float | tuple[float, float, float]

Defaults = Mapping[str, Mapping[str, Any]]
"""Settings of processors, by the name of their class."""

BILINEAR, BICUBIC = 2, 3  # numbers of Pillow
CLIP_COLOURS: Final[Mapping[str, Any]] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
PLAIN_COLOURS: Final[Mapping[str, Any]] = {"image_mean": 0.5, "image_std": 0.5}
_CLIP: dict[str, Any] = {
    **CLIP_COLOURS,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
SQUARE: Final[Mapping[str, Any]] = {"size": {"height": 224, "width": 224}}

_SHARED: Final[Defaults] = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "SiglipImageProcessor": {**PLAIN_COLOURS, **SQUARE},
}


class PixelSettings(Struct, frozen=True, kw_only=True):
    """Settings under their names in `transformers`; those without an effect here are ignored."""

    size: Size | int
    image_mean: _Colour
    image_std: _Colour
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    do_center_crop: bool = False
    crop_size: Size | int | None = None
    do_pad: bool = False
    do_pan_and_scan: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_patches: int = 1
    max_patches: int = 12

    @property
    def normalization(self) -> Normalization | None:
        """Normalization; ``None`` if it is not supported: values stay unchanged, and are not even
        made floats, or they are divided by their greatest.
        """
        if not (self.do_rescale or self.do_normalize):
            return None
        given = _per_channel(self.image_mean), _per_channel(self.image_std)
        if self.do_normalize and given == (NO_MEAN, NO_STD):
            return None
        mean, std = given if self.do_normalize else (NO_MEAN, NO_STD)
        factor = self.rescale_factor if self.do_rescale else 1.0
        return Normalization(rescale_factor=factor, mean=mean, std=std)

    @property
    def edges(self) -> tuple[int, int] | None:
        """Fewest and most pixels, for processors that keep the aspect ratio."""
        size = self.size if isinstance(self.size, dict) else {}
        fewest = self.min_pixels or size.get("shortest_edge")
        most = self.max_pixels or size.get("longest_edge")
        return (fewest, most) if fewest and most else None


def pixel_settings(
    given: Mapping[str, Any],
    own: Defaults | None = None,
    *,
    type_key: str = "image_processor_type",
    class_name: str = "",
) -> PixelSettings | None:
    """Return the settings of a processor's file, completed by the defaults of its class.

    Args:
        given: The file.
        own: Defaults of the family's own processors.
        type_key: Key of the class in the file.
        class_name: The class, if it is known without the file.

    Returns:
        ``None`` if the class or one of its settings is unknown here: only the processor itself can
            interpret them then.
    """
    name = class_name or str(given.get(type_key, "")).removesuffix("Fast")
    defaults = {**_SHARED, **(own or {})}
    if name not in defaults or "auto_map" in given:
        return None
    merged = {**defaults[name], **{key: value for key, value in given.items() if value is not None}}
    try:
        return msgspec.convert(merged, PixelSettings)
    except msgspec.ValidationError:
        return None


def sides(size: Size | int | None) -> tuple[int, int] | None:
    """Return width and height of a size that has both."""
    if isinstance(size, int):
        return size, size
    width, height = (size or {}).get("width"), (size or {}).get("height")
    return (width, height) if width and height else None


def _per_channel(colour: _Colour) -> tuple[float, float, float]:
    return colour if isinstance(colour, tuple) else (colour, colour, colour)
