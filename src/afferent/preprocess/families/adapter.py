"""Any image processor that `transformers` loads: the way for models without a family of their own,
and the reference that the others are compared with.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec

from afferent.ingest.probe import MediaHeader
from afferent.preprocess.families.fixed import FixedFamily
from afferent.preprocess.families.pictures import PictureFamily, image_header, picture
from afferent.preprocess.families.qwen_vl import QwenVlFamily
from afferent.preprocess.media import Array, Media
from afferent.preprocess.plan import FeaturePlan

if TYPE_CHECKING:
    from afferent.preprocess.reference import Reference


class AdapterFamily(
    PictureFamily, tag="adapter", frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Features exactly as the model's own processor makes them.

    Attributes:
        folder: Of the model.
        native: The family that knows how a picture is written in the prompt and what becomes of
            it; ``None`` if only the processor does.
    """

    folder: str
    native: QwenVlFamily | FixedFamily | None = None

    def plan(self, header: MediaHeader) -> FeaturePlan | None:
        header = image_header(header)
        return None if self.native is None else self.native.float_plan(header)

    def bounded(self, max_pixels: int) -> Self:
        native = self.native and self.native.bounded(max_pixels)
        return self if native is self.native else msgspec.structs.replace(self, native=native)

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        self.reference().process(picture(media), out)

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        return dict(features)

    def reference(self) -> Reference:
        """The processor itself, loaded at the first call; workers only: it needs transformers."""
        module = importlib.import_module("afferent.preprocess.reference")
        loaded: Reference = module.load(self)
        return loaded
