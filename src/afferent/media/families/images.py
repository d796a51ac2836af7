"""Base classes of the families that support only images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afferent.errors import UnsupportedMedia
from afferent.media.decoded import Array, DecodedImage, Media
from afferent.media.families.family import MediaTokens, ProcessorLayout
from afferent.media.families.plain import PlainFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader, MediaHeader
from afferent.media.transforms.normalize import Arithmetic, Normalization
from afferent.media.transforms.resize import Resampling
from afferent.types import Modality

_IMAGES_ONLY = "the model takes images only"


class ImageFamily(PlainFamily, frozen=True, kw_only=True):
    """Family of models with only images; ``image`` has an image's tokens."""

    image: MediaTokens

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return {Modality.IMAGE: self.image}


class PixelsFamily(ImageFamily, frozen=True, kw_only=True):
    """Family with ``pixel_values``, ``(..., 3, height, width)``, as bytes until the engine."""

    resampling: Resampling
    normalization: Normalization

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        pixels = self.normalization.apply(features["pixel_values"])
        return {**features, "pixel_values": pixels}

    def processor_inputs(
        self, features: Mapping[str, Array], arithmetic: Arithmetic
    ) -> dict[str, Array]:
        pixels = self.normalization.floats(features["pixel_values"], arithmetic)
        return {**features, "pixel_values": pixels}


class LaidOutFamily(PixelsFamily, frozen=True, kw_only=True):
    """Family whose layout equals that of the model's own processor, which uses float32."""

    def laid_out(self, header: ImageHeader, dtype: str) -> FeaturePlan:
        """Return the plan of an image with pixels of this type."""
        raise NotImplementedError

    @property
    def processor_layout(self) -> ProcessorLayout:
        return ProcessorLayout(plan=lambda header: self.laid_out(header, "float32"), arguments={})

    def plan(self, header: MediaHeader) -> FeaturePlan:
        return self.laid_out(image_header(header), "uint8")


def num_tiles(inputs: Mapping[str, Any]) -> Any:
    """Return the number of an image's tiles as a torch tensor, ``(1,)`` int64, on the CPU.

    Args:
        inputs: With ``pixel_values``, ``(..., 3, height, width)``.
    """
    pixels = inputs["pixel_values"]
    return pixels.new_empty(0).cpu().long().new_tensor([pixels.shape[:-3].numel()])


def image_header(header: MediaHeader) -> ImageHeader:
    """Return the header of an image.

    Raises:
        UnsupportedMedia: It is another medium's.
    """
    if not isinstance(header, ImageHeader):
        raise UnsupportedMedia(_IMAGES_ONLY)
    return header


def decoded_image(media: Media) -> DecodedImage:
    """Return a decoded image.

    Raises:
        UnsupportedMedia: It is another medium.
    """
    if not isinstance(media, DecodedImage):
        raise UnsupportedMedia(_IMAGES_ONLY)
    return media
