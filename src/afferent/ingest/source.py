"""Where an item's bytes come from that did not come with the body: a media host, or a file."""

from __future__ import annotations

import binascii
import re
from dataclasses import replace
from typing import Final

import pybase64

from afferent.config import Limits
from afferent.errors import ForbiddenUrl, InvalidMedia
from afferent.ingest.fetch import FetchSession
from afferent.ingest.raw import RawBuffer, RawMedia
from afferent.types import Modality

_BARE_BASE64: Final = re.compile(r"[A-Za-z0-9+/\r\n]{64}|[A-Za-z0-9+/\r\n]{16,}={0,2}\Z")
_WITHOUT_LINE_BREAKS: Final = {ord("\r"): None, ord("\n"): None}


async def read_media(
    url: str, modality: Modality, buffer: RawBuffer, *, limits: Limits, fetches: FetchSession
) -> RawMedia:
    """The encoded bytes of the item behind ``url``; those of a fetch come into ``buffer``.

    A ``data:`` URL is one that a streaming reader has left in the JSON: it is short, or odd.

    Raises:
        InvalidMedia: Or one of its subclasses, which say what is wrong.
        StoreFull: There is no room in the arena now.
    """
    most = limits.of(modality).max_nbytes
    if url[:5].lower() != "data:":
        if _BARE_BASE64.match(url):
            raise ForbiddenUrl(
                f"this is base64, and no URL: put data:{modality}/...;base64, in front of it"
            )
        fetched = await fetches.fetch_into(
            url, buffer.write, modality=modality, max_nbytes=most, make_room=buffer.make_room
        )
        return replace(await buffer.finish_sealed(origin="fetch"), fresh_s=fetched.fresh_s)
    header, comma, payload = url[5:].partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ForbiddenUrl(f"a data: URL has the form data:{modality}/...;base64,...")
    try:
        data = pybase64.b64decode(payload.translate(_WITHOUT_LINE_BREAKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia(f"the base64 of the {modality} file is malformed") from error
    return RawMedia("data", len(data), data=data)
