"""Media types of files, by their first bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from afferent.errors import UnsupportedMedia
from afferent.media.headers.document_format import document_format_of
from afferent.media.headers.image_format import Data, format_of, is_container
from afferent.types import Modality

_IMAGES: Final = {
    "ico": "x-icon",
    "jpeg2000": "jp2",
    "pnm": "x-portable-anymap",
    "tga": "x-tga",
}
"""Subtypes of formats that are not named like them."""
_OTHERS: Final = {
    Modality.AUDIO: (
        (re.compile(rb"(?:RIFF|RF64)....WAVE", re.DOTALL), "audio/wav"),
        (re.compile(rb"ID3|\xff[\xe2-\xff]"), "audio/mpeg"),
        (re.compile(rb"fLaC"), "audio/flac"),
        (re.compile(rb"OggS"), "audio/ogg"),
        (re.compile(rb"....ftyp", re.DOTALL), "audio/mp4"),
        (re.compile(rb"\x1a\x45\xdf\xa3"), "audio/webm"),
    ),
    Modality.VIDEO: (
        (re.compile(rb"....ftypqt", re.DOTALL), "video/quicktime"),
        (re.compile(rb"\x1a\x45\xdf\xa3"), "video/webm"),
        (re.compile(rb"OggS"), "video/ogg"),
        (re.compile(rb"GIF8"), "image/gif"),
        (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
        (re.compile(rb"RIFF....AVI ", re.DOTALL), "video/x-msvideo"),
    ),
}
_UNKNOWN: Final = {Modality.AUDIO: "audio/wav", Modality.VIDEO: "video/mp4"}
_HEAD_NBYTES: Final = 16


def format_name(data: Data) -> str:
    """Return the name of an image's format, such as ``jpeg`` or ``avif``, by its first bytes.

    Raises:
        UnsupportedMedia: They belong to no known format.
    """
    return format_of(data).replace(" ", "").lower()


def media_type_of(modality: Modality, data: Data) -> str:
    """Return the media type of a file, such as ``image/jpeg``; a usual one if it is unknown."""
    if modality is Modality.IMAGE:
        try:
            name = format_name(data)
        except UnsupportedMedia:
            return "application/octet-stream"
        return f"image/{_IMAGES.get(name, name)}"
    head = bytes(data[:_HEAD_NBYTES])
    found = (kind for pattern, kind in _OTHERS[modality] if pattern.match(head))
    return next(found, _UNKNOWN[modality])


def is_media(data: Data) -> bool:
    """Whether a file's first bytes are those of an image, a video, audio or a document.

    Args:
        data: At least 18 bytes; a PDF may have others before its mark.
    """
    head = bytes(data)
    patterns = (pattern for kinds in _OTHERS.values() for pattern, _ in kinds)
    return (
        _is_read_by(format_of, head)
        or is_container(head)
        or _is_read_by(document_format_of, head)
        or any(pattern.match(head) for pattern in patterns)
    )


def _is_read_by(find_format: Callable[[bytes], object], head: bytes) -> bool:
    try:
        find_format(head)
    except UnsupportedMedia:
        return False
    return True
