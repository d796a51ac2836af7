"""Sources of media: paths, bytes of files, PIL images and arrays."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from afferent.batch.item_features import Form
from afferent.batch.media_model import image_header_of
from afferent.config import Limits
from afferent.errors import (
    AfferentError,
    InternalError,
    InvalidMedia,
    MediaTooLarge,
    UnsupportedMedia,
)
from afferent.media.decode.image import decode_image
from afferent.media.decode.pillow import copy_rgb, is_grey16, open_image
from afferent.media.decoded import DecodedAudio, DecodedImage
from afferent.media.headers.image_format import format_of
from afferent.media.headers.image_sizes import is_deep_grey
from afferent.media.headers.probe import ImageHeader, check_size
from afferent.types import Modality
from afferent.wording import shown

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[np.generic]
"""Path of a file, its bytes, a PIL image, pixels ``(height, width, 3)``, or samples ``(n,)``."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def as_our_error() -> Iterator[None]:
    """Raise an error of `afferent.errors` for any error of a decoder, so that a batch goes on."""
    try:
        yield
    except AfferentError:
        raise
    except MemoryError as error:
        raise MediaTooLarge("the item takes more memory to decode than there is") from error
    except Exception as error:
        log.exception("an item could not be processed")
        raise InternalError("an item could not be processed") from error


def read(
    source: Source, *, form: Form, sample_rate_hz: int, limits: Limits
) -> memoryview | DecodedImage | DecodedAudio:
    """Return the bytes of a file, or a decoded source.

    Args:
        form: A PIL image with 16 bits is converted as this form requires.
        sample_rate_hz: Rate of an array of samples.
        limits: Limits of a file's size, and of an image's.

    Raises:
        InvalidMedia: It can't be read, or is no image or clip.
        MediaTooLarge: The file is larger than any item may be, or the image exceeds a limit.
    """
    match source:
        case str() | os.PathLike():
            return memoryview(_read_file(source, limits))
        case bytes() | bytearray() | memoryview():
            return _flat(source)
        case Image.Image():
            check_size(source.width, source.height, limits)
            return DecodedImage(_rgb(source, form))
        case np.ndarray() if source.ndim == 1:
            return DecodedAudio(_samples(source), sample_rate_hz)
        case np.ndarray():
            header = image_header_of(source)
            check_size(header.width, header.height, limits)
            return DecodedImage(np.ascontiguousarray(source, np.uint8))
    raise InvalidMedia(
        f"{shown(source)} is no item: give a path, the bytes of a file, a PIL image or an array"
    )


def as_file(source: memoryview | DecodedImage | DecodedAudio, form: Form) -> memoryview:
    """Return a source as a file, for a worker; decoded ones become lossless files.

    Raises:
        InvalidMedia: Workers can't make this form of it.
    """
    match source:
        case DecodedImage(pixels):
            return memoryview(imagecodecs.png_encode(pixels, level=0))
        case DecodedAudio(samples, rate_hz):
            return memoryview(_wav(samples, rate_hz))
    if form == "hf" and is_grey16_file(source):
        raise InvalidMedia(
            'an image with 16 bits of grey has another form="hf" than others, which workers do not '
            'make: use where="here" for it'
        )
    return source


def decode_for(data: memoryview, header: ImageHeader, limits: Limits, form: Form) -> DecodedImage:
    """Decode an image.

    Only for 16 bits of grey the forms differ: `transformers` clips them, so that most become white.

    Raises:
        InvalidMedia: It can't be decoded.
        MediaTooLarge: It exceeds the limits.
    """
    if form == "hf" and is_grey16_file(data):
        check_size(header.width, header.height, limits)
        try:
            with open_image(data, format_of(data)) as image:
                upright = ImageOps.exif_transpose(image)
                return DecodedImage(np.array(upright.convert("RGB")))
        except (OSError, ValueError, SyntaxError) as error:
            raise InvalidMedia("the image can't be decoded as transformers does") from error
    return decode_image(data, header, limits)


def is_grey16_file(data: memoryview) -> bool:
    """Return whether a file is an image with 16 bits of grey."""
    try:
        return is_deep_grey(data)
    except UnsupportedMedia:
        return False


def _read_file(path: str | os.PathLike[str], limits: Limits) -> bytes:
    name = os.fspath(path)
    most = max(limits.of(modality).max_nbytes for modality in Modality)
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would block
            raise InvalidMedia(f"{name} is no regular file")
        if found.st_size > most:
            raise MediaTooLarge(
                f"{name} has {found.st_size} bytes; at most {most} are accepted (limits: "
                "max_image_nbytes, max_video_nbytes, max_audio_nbytes)"
            )
        with Path(path).open("rb") as file:
            return file.read(most)
    except OSError as error:
        if "://" in name:
            raise InvalidMedia(f"{name} is a URL, which is not fetched: give its bytes") from error
        raise InvalidMedia(f"{name} can't be read: {error.strerror}") from error
    except ValueError as error:  # it contains a zero byte, or is no text of the file system
        raise InvalidMedia(f"{name!r} is no path: {error}") from error


def _flat(data: bytes | bytearray | memoryview) -> memoryview:
    """Return the bytes of a file in a row."""
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidMedia(
            f"the bytes of a file must be contiguous ({error}): give bytes(view)"
        ) from error


def _rgb(image: Image.Image, form: Form) -> NDArray[np.uint8]:
    """Return an image of any mode as RGB over white; its EXIF data, if any, are not applied."""
    try:
        if form == "hf" and is_grey16(image):
            return np.array(image.convert("RGB"))
        pixels = np.empty((image.height, image.width, 3), np.uint8)
        copy_rgb(image, pixels)
    except (OSError, ValueError, SyntaxError) as error:  # opened, and not yet decoded
        raise InvalidMedia("the PIL image can't be decoded") from error
    return pixels


def _samples(samples: NDArray[np.generic]) -> NDArray[np.float32]:
    if samples.dtype.kind != "f" or not samples.size:
        raise InvalidMedia(
            "a clip as an array is float, (num_samples,), mono, at the model's rate; this one is "
            f"{samples.dtype.name} {samples.shape}"
        )
    return samples.astype(np.float32)


def _wav(samples: NDArray[np.float32], rate_hz: int) -> bytes:
    """Return a WAV file with float samples."""
    data = samples.astype("<f4").tobytes()
    rates = rate_hz, 4 * rate_hz
    head = struct.pack("<8sIHHIIHH4sI", b"WAVEfmt ", 16, 3, 1, *rates, 4, 32, b"data", len(data))
    return struct.pack("<4sI", b"RIFF", len(head) + len(data)) + head + data
