"""Models without features: an engine that decodes media itself may serve them."""

from __future__ import annotations

from collections.abc import Mapping

from afferent.errors import UnsupportedMedia
from afferent.media.decoded import Array, Media
from afferent.media.families.family import MediaTokens
from afferent.media.families.plain import PlainFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import MediaHeader
from afferent.types import Modality


class UnknownFamily(PlainFamily, frozen=True, kw_only=True):
    """Family that supports no media."""

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return {}

    def plan(self, header: MediaHeader) -> FeaturePlan:
        raise UnsupportedMedia("no features are made for this model")

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        raise UnsupportedMedia("no features are made for this model")
