"""Adapter for any image processor that `transformers` loads.

It serves models without a family of their own, and is the reference for the other families.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import msgspec

from afferent.media.decoded import Array, Media
from afferent.media.families.family import ProcessorLayout
from afferent.media.families.images import ImageFamily, decoded_image, image_header
from afferent.media.families.native import NativeFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import MediaHeader

if TYPE_CHECKING:
    from afferent.media.families.reference import Reference


_MAX_REFERENCES = 64
"""Limit of processors that are kept, one for each bound; each image processor is loaded once."""


class AdapterFamily(ImageFamily, tag="adapter", frozen=True, kw_only=True):
    """Features exactly as the model's own processor makes them.

    Attributes:
        folder: Folder of the model.
        native: Family that knows an image's prompt and features; ``None`` if only the processor
            does.
    """

    folder: str
    native: NativeFamily | None = None

    @property
    def processor_layout(self) -> ProcessorLayout | None:
        return None if self.native is None else self.native.processor_layout

    def plan(self, header: MediaHeader) -> FeaturePlan | None:
        header = image_header(header)
        layout = self.processor_layout
        return None if layout is None else layout.plan(header)

    def plan_exactly(self, header: MediaHeader) -> FeaturePlan:
        return self.plan(header) or self.reference().plan(image_header(header))

    def without_paths(self) -> Self:
        return msgspec.structs.replace(self, folder="")

    def bounded(self, max_pixels: int) -> Self:
        native = self.native and self.native.bounded(max_pixels)
        return self if native is self.native else msgspec.structs.replace(self, native=native)

    def load(self) -> None:
        self.reference()

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        self.reference().process(decoded_image(media), out)

    def reference(self) -> Reference:
        """Return the processor itself, loaded at the first call; workers only.

        Raises:
            UnsupportedModel: `transformers` can't load or use it here.
        """
        return _reference(self)


@functools.lru_cache(_MAX_REFERENCES)
def _reference(family: AdapterFamily) -> Reference:
    """Return the processor of a family; a client may bound its images in many ways."""
    # It imports torch and transformers; frontends lack the memory for these, and never come here.
    from afferent.media.families.reference import Reference

    return Reference(family.folder, family.image, family.processor_layout)
