"""Where an item's bytes come from: a ``data:`` URL in the request, or a media host."""

from __future__ import annotations

import asyncio
import binascii
from dataclasses import dataclass

import pybase64

from afferent.config import Limits
from afferent.errors import ForbiddenUrl, InvalidMedia, MediaTooLarge
from afferent.ingest.fetch import FetchSession

_SLOW_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Media:
    """An item's encoded bytes, and how they came: ``data`` or ``fetch``."""

    data: bytes
    origin: str


async def read_media(url: str, *, limits: Limits, fetches: FetchSession) -> Media:
    """The encoded bytes of the image behind ``url``.

    Raises:
        InvalidMedia: Or one of its subclasses, which say what is wrong.
    """
    if url[:5].lower() != "data:":
        return Media(await fetches.fetch(url, max_nbytes=limits.max_image_nbytes), "fetch")
    header, comma, payload = url[5:].partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ForbiddenUrl("a data: URL has the form data:image/...;base64,...")
    if len(payload) > limits.max_image_nbytes * 4 // 3 + 4:
        raise MediaTooLarge(f"the image has more than {limits.max_image_nbytes} bytes")
    try:
        if len(payload) < _SLOW_NBYTES:
            data = pybase64.b64decode(payload, validate=True)
        else:  # the decoder releases the GIL
            data = await asyncio.to_thread(pybase64.b64decode, payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia("the image's base64 is malformed") from error
    return Media(data, "data")
