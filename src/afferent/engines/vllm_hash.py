"""vLLM's own name of an image (``mm_hash``), computed from its file without decoding it.

Source: ``vllm.multimodal.hasher`` and ``vllm.multimodal.processing.inputs`` of vLLM 0.32 and 0.33.
Each chunk is preceded by its length, and each container by its kind.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, Literal

from afferent import keys
from afferent.media.headers.header import is_read_as_rgb
from afferent.media.headers.image_format import Data

Hashes = Literal["afferent", "vllm-blake3", "vllm-sha256", "vllm-sha512"]
"""Setting: names by Afferent, or by a vLLM with this ``VLLM_MM_HASHER_ALGORITHM``."""
ALGORITHMS: Final[dict[Hashes, keys.Algorithm]] = {
    "vllm-blake3": "blake3",
    "vllm-sha256": "sha256",
    "vllm-sha512": "sha512",
}
_SEQUENCE, _MAPPING, _LEAF = b"\x01", b"\x02", b"\x03"
_WHITE: Final = (255, 255, 255)


def image_hash(file: Data, *, model: str, algorithm: keys.Algorithm) -> str:
    """Return the name that a stock vLLM gives an image without options, in hexadecimal.

    It is empty where it depends on the mode in which Pillow opens the file, and the header here
    does not give it.

    Args:
        file: The encoded image.
        model: The model as vLLM was told it (``--model``).
        algorithm: vLLM's ``VLLM_MM_HASHER_ALGORITHM``.

    Raises:
        UnsupportedMedia: The file is of no known format.
        InvalidMedia: Its header is broken.
    """
    is_rgb = is_read_as_rgb(file)
    if is_rgb is None:
        return ""
    if is_rgb:
        item = [_LEAF, *_framed(b"image"), _LEAF, *_framed(file)]
    else:
        item = [_LEAF, *_framed(b"image"), *_converted(file)]
    named = (*_framed(b"model_id"), _LEAF, *_framed(model.encode()))
    return keys.hash_pieces((*_framed(b"image"), *item, *named), algorithm).hex()


def _converted(file: Data) -> Iterator[Data]:
    """Yield an image that vLLM converts to RGB on a white background."""
    yield from (_MAPPING, _length(2))
    yield from (*_framed(b"io_config"), _MAPPING, _length(2))
    yield from (*_framed(b"image_mode"), _LEAF, *_framed(b"RGB"))
    yield from (*_framed(b"rgba_background_color"), _SEQUENCE, _length(len(_WHITE)))
    for value in _WHITE:
        yield from (_LEAF, *_framed(struct.pack("<q", value)))
    yield from (*_framed(b"data"), _LEAF, *_framed(file))


def _framed(chunk: Data) -> tuple[bytes, Data]:
    return _length(len(chunk)), chunk


def _length(number: int) -> bytes:
    return number.to_bytes(8, "little")
