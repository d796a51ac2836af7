"""Base class with the answers of most families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

from msgspec import Struct

from afferent.media.families.family import ProcessorLayout
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import MediaHeader
from afferent.media.transforms import resize


class _Plans(Protocol):
    def plan(self, header: MediaHeader) -> FeaturePlan: ...


class PlainFamily(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Family that plans and makes its features here, for media of any size and length.

    See `Family` for the meaning of each method.
    """

    @property
    def sample_rate_hz(self) -> int:
        return 0

    @property
    def processor_layout(self) -> ProcessorLayout | None:
        return None

    def plan_exactly(self: _Plans, header: MediaHeader) -> FeaturePlan:
        return self.plan(header)

    def without_paths(self) -> Self:
        return self

    def sampling(self, max_frames: int) -> Self:
        return self

    def resizing(self, rule: resize.ResizeRule) -> Self:
        return resize.by_rule(self, rule)

    def bounded(self, max_pixels: int) -> Self:
        return self

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        return dict(features)

    def load(self) -> None:
        resize.load(self)
