"""Request for items: what a body or a URL has, before anything of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afferent.admission.shares import NAMELESS, Share
from afferent.media.body.raw import RawMedia
from afferent.types import Modality

Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class SeenMedia:
    """Item whose features were made before, known by the digest of its encoded bytes."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Image, audio clip or video, from the body or by URL."""

    modality: Modality
    source: str | RawMedia | SeenMedia | None
    """``None`` for an earlier item, known by its ``uuid``."""
    detail: Detail = "auto"
    uuid: str | None = None
    max_pixels: int = 0
    """Maximum of pixels for an image, if it is less than the model's own; 0 for the default."""


@dataclass(frozen=True, slots=True)
class ItemRequest:
    """Media of one request, in prompt order.

    ``request_id`` pins their objects. One tenant's cached items never hit for another.
    """

    request_id: str
    media: tuple[MediaPart, ...]
    share: Share = NAMELESS

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        return self.share.tenant
