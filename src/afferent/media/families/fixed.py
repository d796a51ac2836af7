"""Models that resize every image to one size: perhaps cropped, always as many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from afferent.media.decoded import Array, DecodedImage, Media
from afferent.media.families.family import ProcessorLayout
from afferent.media.families.images import ImageFamily, decoded_image, image_header
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.settings import PixelSettings, Size, sides
from afferent.media.headers.probe import ImageHeader, MediaHeader
from afferent.media.transforms.normalize import Arithmetic, Normalization
from afferent.media.transforms.resize import Resampling
from afferent.types import TensorSpec


class Framing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transformation of an image to ``width`` times ``height``.

    Its shorter side becomes ``shortest_edge`` before the middle is cut out; 0 means that nothing is
    cut, and the image is stretched.
    """

    width: int
    height: int
    shortest_edge: int
    resampling: Resampling
    normalization: Normalization

    def write(self, image: DecodedImage, out: Array) -> None:
        """Write into ``out``, ``(3, height, width)``."""
        pixels = self.resampling.resize(image.pixels, *self._resized(image.header))
        top = (pixels.shape[0] - self.height) // 2
        left = (pixels.shape[1] - self.width) // 2
        cut = pixels[top : top + self.height, left : left + self.width]
        out[...] = cut.transpose(2, 0, 1)

    def _resized(self, header: ImageHeader) -> tuple[int, int]:
        edge = self.shortest_edge
        if not edge:
            return self.width, self.height
        if header.width <= header.height:
            return edge, int(edge * header.height / header.width)
        return int(edge * header.width / header.height), edge


class FixedFamily(ImageFamily, tag="fixed", frozen=True, kw_only=True):
    """Family of models with one image size; ``prompt`` is each image's, see `FeaturePlan`."""

    framing: Framing
    prompt: tuple[int | str, ...]

    def plan(self, header: MediaHeader) -> FeaturePlan:
        image_header(header)
        return self._plan("uint8")

    @property
    def processor_layout(self) -> ProcessorLayout:
        return ProcessorLayout(plan=lambda _: self._plan("float32"), arguments={})

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        self.framing.write(decoded_image(media), out["pixel_values"][0])

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        pixels = self.framing.normalization.apply(features["pixel_values"])
        return {**features, "pixel_values": pixels}

    def processor_inputs(
        self, features: Mapping[str, Array], arithmetic: Arithmetic
    ) -> dict[str, Array]:
        pixels = self.framing.normalization.floats(features["pixel_values"], arithmetic)
        return {**features, "pixel_values": pixels}

    def _plan(self, dtype: str) -> FeaturePlan:
        shape = (1, 3, self.framing.height, self.framing.width)
        return FeaturePlan({"pixel_values": TensorSpec(dtype, shape)}, self.prompt)


def framing(settings: PixelSettings) -> Framing | None:
    """Return the framing by the settings; ``None`` if it is not supported here."""
    normalization = settings.normalization
    if normalization is None or not settings.do_resize:
        return None
    if settings.do_pad or settings.do_pan_and_scan:
        return None
    given = settings.size
    size: Size = {"shortest_edge": given} if isinstance(given, int) else given
    edge, stretched = size.get("shortest_edge") or 0, sides(size)
    if settings.do_center_crop:
        cut = sides(settings.crop_size)
        # A crop from less than its own size would add a border.
        if set(size) != {"shortest_edge"} or cut is None or max(cut) > edge:
            return None
    elif stretched is not None:
        edge, cut = 0, stretched
    else:
        return None
    return Framing(
        width=cut[0],
        height=cut[1],
        shortest_edge=edge,
        resampling=Resampling(settings.resample),
        normalization=normalization,
    )
