"""Jobs of preprocess workers: the payloads that frontends send, and the plans in return."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from afferent.errors import InternalError
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from afferent.telemetry.trace import declare_stages
from afferent.types import Modality, NonNegative

declare_stages("read_container", "decode", "write_file", "process", "render", "list_pages")


class _Job(Struct, array_like=True, forbid_unknown_fields=True):
    pass


class PlanImage(_Job, tag="plan image"):
    """Plan an image of this size, if only the model's own processor can; the job has no input."""

    header: ImageHeader
    max_pixels: NonNegative = 0


class InputRange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Range of the file in the job's input: the items of a request may share one object."""

    start: NonNegative
    nbytes: NonNegative


class PlanFile(_Job, tag="plan file"):
    """Plan a file whose header a confined worker reads, and not a frontend.

    The plan is exact for an image or a video, and an upper bound for an audio clip. ``max_pixels``
    is as for `MakeFeatures`.
    """

    modality: Modality
    file: InputRange
    max_pixels: NonNegative = 0


class MakeFeatures(_Job, tag="features"):
    """Make the features of a file with this header.

    ``max_pixels`` is the request's own limit for an image; 0 for none but the family's.
    """

    header: MediaHeader
    file: InputRange
    max_pixels: NonNegative = 0


class ListPages(_Job, tag="list pages"):
    """List the pages ``first`` to ``last`` of a document; the object is a `ListedPages`.

    ``last`` is 0 for the last page of the document. A video has no choice of pages: the frames that
    become images are listed.
    """

    is_video: bool
    file: InputRange
    first: Annotated[int, Meta(ge=1)]
    last: NonNegative
    dpi: Annotated[int, Meta(ge=1)]


class RenderPages(_Job, tag="render pages"):
    """Render pages of a document, or frames of a video; `pages_of` reads the object.

    ``pages`` has the number of each one, ascending, and the width and height of its image in
    pixels; without these, there is no image.
    """

    is_video: bool
    file: InputRange
    pages: list[tuple[Annotated[int, Meta(ge=1)], tuple[NonNegative, NonNegative] | None]]
    has_text: bool


Job = PlanImage | PlanFile | MakeFeatures | ListPages | RenderPages


_PLAN_US = 1_000
_NS_A_PIXEL, _NS_A_FRAMES_PIXEL, _NS_A_SAMPLE, _NS_A_BYTE = 12, 5, 20, 3
_NS_A_PAGES_PIXEL = 40


def cost_us(job: Job) -> int:
    """Return the estimated time of a job from its header alone, for fair scheduling.

    The tenant is charged the actual time.
    """
    match job:
        case MakeFeatures(ImageHeader(width, height), file):
            took_ns = _NS_A_PIXEL * width * height + _NS_A_BYTE * file.nbytes
        case MakeFeatures(VideoHeader(width, height, num_frames), file):
            took_ns = _NS_A_FRAMES_PIXEL * width * height * num_frames + _NS_A_BYTE * file.nbytes
        case MakeFeatures(AudioHeader(num_channels=num_channels, num_frames=num_frames), file):
            took_ns = _NS_A_SAMPLE * num_channels * num_frames + _NS_A_BYTE * file.nbytes
        case RenderPages(file=file, pages=pages):
            num_pixels = sum(size[0] * size[1] for _, size in pages if size is not None)
            took_ns = _NS_A_PAGES_PIXEL * num_pixels or file.nbytes
        case PlanFile(file=file) | ListPages(file=file):
            took_ns = file.nbytes
        case _:
            took_ns = 0
    return _PLAN_US + took_ns // 1000


class Planned(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Object made by a planning job, as msgpack."""

    header: MediaHeader
    plan: FeaturePlan


class ListedPages(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sizes in pixels of the listed pages of a document, or frames of a video, by their numbers."""

    sizes: dict[int, tuple[NonNegative, NonNegative]]


PLAN_NBYTES = 64 << 10
"""Space for a `Planned` or a `ListedPages`; the unused part is released."""

_LENGTH = struct.Struct("<Q")


def pages_nbytes(pages: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of rendered pages, from those of the image and the text of each."""
    return _LENGTH.size + sum(image + text + 2 * _LENGTH.size for image, text in pages)


def write_pages(pages: Iterable[tuple[bytes, bytes]], block: memoryview) -> int:
    """Write the images and texts of pages into a block, with their lengths and number behind them.

    Returns:
        The number of bytes.

    Raises:
        InternalError: The block is too small.
    """
    data, at = np.frombuffer(block, np.uint8), 0
    lengths: list[int] = []

    def write(piece: bytes) -> None:
        nonlocal at
        if at + len(piece) > len(data):
            raise InternalError("pages are larger than their bound")
        np.copyto(data[at : at + len(piece)], np.frombuffer(piece, np.uint8))
        at += len(piece)

    for page in pages:
        for piece in page:
            write(piece)
            lengths.append(len(piece))
    write(b"".join(_LENGTH.pack(each) for each in (*lengths, len(lengths))))
    return at


def pages_of(block: memoryview) -> list[tuple[InputRange, str]]:
    """Return the location of each page's image in a block, a PNG file or empty, and its text."""
    (number,) = _LENGTH.unpack(block[-_LENGTH.size :])
    end = len(block) - _LENGTH.size
    lengths = [each for (each,) in _LENGTH.iter_unpack(block[end - number * _LENGTH.size : end])]
    at, found = 0, []
    for image_nbytes, text_nbytes in zip(lengths[::2], lengths[1::2], strict=True):
        behind = at + image_nbytes + text_nbytes
        text = str(block[at + image_nbytes : behind], "utf-8")
        found.append((InputRange(at, image_nbytes), text))
        at = behind
    return found


job_decoder = msgspec.msgpack.Decoder(Job)
planned_decoder = msgspec.msgpack.Decoder(Planned)
pages_decoder = msgspec.msgpack.Decoder(ListedPages)
