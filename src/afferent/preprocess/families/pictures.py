"""What is common to the families that take pictures and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from afferent.errors import UnsupportedMedia
from afferent.ingest.probe import ImageHeader, MediaHeader
from afferent.preprocess.family import MediaTokens
from afferent.preprocess.media import Media, Picture
from afferent.types import Modality

_PICTURES_ONLY = "the model takes images only"


class PictureFamily(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``image`` are a picture's tokens."""

    image: MediaTokens

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return {Modality.IMAGE: self.image}

    @property
    def sample_rate_hz(self) -> int:
        return 0


def image_header(header: MediaHeader) -> ImageHeader:
    """Raises: UnsupportedMedia: It is another medium's."""
    if not isinstance(header, ImageHeader):
        raise UnsupportedMedia(_PICTURES_ONLY)
    return header


def picture(media: Media) -> Picture:
    """Raises: UnsupportedMedia: It is none."""
    if not isinstance(media, Picture):
        raise UnsupportedMedia(_PICTURES_ONLY)
    return media
