"""Image files of every kind, made by the tests themselves."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable

import numpy as np
from PIL import Image


def encoded(image: Image.Image, format: str, **parameters: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **parameters)
    return out.getvalue()


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Soft blotches with some noise, as a camera sees them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noisy = soft + rng.normal(0, 4, soft.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def in_mode(source: Image.Image, mode: str) -> Image.Image:
    """In a mode of Pillow's; where it has transparency, what is dark is clear."""
    if mode == "I;16":
        values = np.asarray(source.convert("L")).astype(np.uint16)
        return Image.fromarray((values * 257) ^ np.uint16(0x55))
    if mode == "P":
        return source.quantize(32)
    image = source.convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(source.convert("L").point(lambda value: max(0, value * 2 - 128)))
    return image


def oriented(orientation: int, *, big_endian: bool = False) -> bytes:
    """EXIF data that say nothing but an orientation."""
    if big_endian:
        return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def segment(marker: int, body: bytes, length: int | None = None) -> bytes:
    """Of a JPEG file; ``length`` may lie."""
    size = len(body) + 2 if length is None else length
    return bytes((0xFF, marker)) + struct.pack(">H", size) + body


def chunk(kind: bytes, body: bytes, length: int | None = None) -> bytes:
    """Of a PNG file; ``length`` may lie."""
    size = len(body) if length is None else length
    return struct.pack(">I", size) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def riff_chunk(kind: bytes, body: bytes, length: int | None = None) -> bytes:
    """Of a WebP file; ``length`` may lie."""
    size = len(body) if length is None else length
    return kind + struct.pack("<I", size) + body + b"\0" * (len(body) % 2)


def webp(chunks: Iterable[bytes]) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def png(
    pixels: np.ndarray, *, colours: int, interlaced: bool = False, extra: Iterable[bytes] = ()
) -> bytes:
    """Of ``(height, width, channels)``, 8 or 16 bits; ``extra`` chunks stand before the pixels."""
    height, width = pixels.shape[:2]
    bits = 8 * pixels.itemsize
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    rows = b"".join(
        b"\0" + row.astype(pixels.dtype.newbyteorder(">")).tobytes()
        for left, top, across, down in passes
        for row in pixels[top::down, left::across]
        if row.size
    )
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, interlaced)
    parts = (
        chunk(b"IHDR", header),
        *extra,
        chunk(b"IDAT", zlib.compress(rows)),
        chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)),
    (0, 1, 1, 2),
)
