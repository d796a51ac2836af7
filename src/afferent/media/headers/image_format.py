"""Formats of image files, by their first bytes, as in Pillow. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from afferent.errors import UnsupportedMedia

Data = bytes | memoryview

_EBML: Final = b"\x1a\x45\xdf\xa3"
_BOXES: Final = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
_AVIF: Final = frozenset({b"avif", b"avis"})
_STILLS: Final = _AVIF | frozenset(
    {
        *(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"),
        *(b"mif1", b"msf1"),
    }
)
"""Brands of images in the boxes of an ISO media file; ``mif1`` and ``msf1`` are of any codec."""


class ImageFormat(StrEnum):
    JPEG = "JPEG"
    PNG = "PNG"
    WEBP = "WebP"
    GIF = "GIF"
    AVIF = "AVIF"
    HEIC = "HEIC"
    TIFF = "TIFF"
    BMP = "BMP"
    ICO = "ICO"
    JPEG2000 = "JPEG 2000"
    PNM = "PNM"
    TGA = "TGA"


ALL_FORMATS: Final = f"{', '.join(list(ImageFormat)[:-1])} or {list(ImageFormat)[-1]}"


def format_of(data: Data) -> ImageFormat:
    """Return the format by the first bytes alone, without the name or the declared type.

    Raises:
        UnsupportedMedia: They belong to no format that is decoded here, or to several: TGA has no
            signature.
    """
    magic = bytes(data[:18])
    for kind, pattern in _MAGIC.items():
        if pattern.match(magic):
            return kind
    if is_still(data):
        brands = bytes(data[8 : min(int.from_bytes(magic[:4]), _MAX_BRANDS_NBYTES)])
        found = {brands[at : at + 4] for at in range(0, len(brands), 4)}
        is_any = brands[:4] in (b"mif1", b"msf1")
        is_avif = bool(_AVIF & found) if is_any else brands[:4] in _AVIF
        return ImageFormat.AVIF if is_avif else ImageFormat.HEIC
    raise UnsupportedMedia(f"the bytes are not those of a {ALL_FORMATS} image")


def is_still(data: Data) -> bool:
    """Return whether a file's first bytes are those of an image in boxes: AVIF or HEIC."""
    magic = bytes(data[:12])
    return magic[4:8] == b"ftyp" and magic[8:] in _STILLS


def is_container(data: Data) -> bool:
    """Return whether a file's first bytes are those of a video's container: MP4, MOV, Matroska."""
    magic = bytes(data[:8])
    return magic.startswith(_EBML) or (magic[4:] in _BOXES and not is_still(data))


_MAX_BRANDS_NBYTES: Final = 256
_TGA: Final = (
    # The length of a name, without those by which PCX, IM and IPTC files begin.
    rb"[\x00-\x09\x0b\x0c\x0e-\x19\x1b\x1d-\x1f]"
    # True colour or grey without a palette, or colours out of a palette that begins at its start.
    rb"(?:\x00[\x02\x03\x0a\x0b]\x00{5}|\x01[\x01\x09]\x00\x00..[\x10\x18\x20])"
    rb".{8}[\x01\x08\x10\x18\x20]."
)
_MAGIC: Final[dict[ImageFormat, re.Pattern[bytes]]] = {
    kind: re.compile(pattern, re.DOTALL)
    for kind, pattern in {
        ImageFormat.JPEG: rb"\xff\xd8\xff",
        ImageFormat.PNG: rb"\x89PNG\r\n\x1a\n",
        ImageFormat.WEBP: rb"RIFF.{4}WEBP",
        ImageFormat.GIF: rb"GIF8[79]a",
        ImageFormat.TIFF: rb"II[*+]\x00|MM\x00[*+]",
        ImageFormat.BMP: rb"BM",
        ImageFormat.ICO: rb"\x00\x00\x01\x00",
        ImageFormat.JPEG2000: rb"\xff\x4f\xff\x51|\x00{3}\x0cjP  \r\n\x87\n",
        ImageFormat.PNM: rb"P[1-6][ \t\n\v\f\r]",
        ImageFormat.TGA: _TGA,
    }.items()
}
