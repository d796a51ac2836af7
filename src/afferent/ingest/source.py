"""Where an item's bytes come from: a ``data:`` URL in the request, or a media host."""

from __future__ import annotations

import asyncio
import binascii
from dataclasses import dataclass

import pybase64

from afferent.config import Limits
from afferent.errors import ForbiddenUrl, InvalidMedia, MediaTooLarge
from afferent.ingest.fetch import FetchSession
from afferent.types import Modality

_SLOW_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Media:
    """An item's encoded bytes, and how they came: ``data`` or ``fetch``."""

    data: bytes
    origin: str


def max_nbytes(modality: Modality, limits: Limits) -> int:
    """The largest file of a kind."""
    match modality:
        case Modality.IMAGE:
            return limits.max_image_nbytes
        case Modality.AUDIO:
            return limits.max_audio_nbytes
        case Modality.VIDEO:
            return limits.max_video_nbytes


async def read_media(
    url: str, modality: Modality, *, limits: Limits, fetches: FetchSession
) -> Media:
    """The encoded bytes of the item behind ``url``.

    Raises:
        InvalidMedia: Or one of its subclasses, which say what is wrong.
    """
    most = max_nbytes(modality, limits)
    if url[:5].lower() != "data:":
        return Media(await fetches.fetch(url, modality=modality, max_nbytes=most), "fetch")
    header, comma, payload = url[5:].partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ForbiddenUrl(f"a data: URL has the form data:{modality}/...;base64,...")
    if len(payload) > most * 4 // 3 + 4:
        raise MediaTooLarge(f"the {modality} file has more than {most} bytes")
    try:
        if len(payload) < _SLOW_NBYTES:
            data = pybase64.b64decode(payload, validate=True)
        else:  # the decoder releases the GIL
            data = await asyncio.to_thread(pybase64.b64decode, payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia(f"the base64 of the {modality} file is malformed") from error
    return Media(data, "data")
