"""Jobs of preprocess workers: the payloads that frontends send, and the plans in return."""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

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
    """List the pages ``first`` to ``last`` of a document; the object is a `DocumentPages`.

    ``last`` is 0 for the last page of the document.
    """

    file: InputRange
    first: Annotated[int, Meta(ge=1)]
    last: NonNegative
    dpi: Annotated[int, Meta(ge=1)]


class RenderPage(_Job, tag="render page"):
    """Render a page of a document; `page_of` reads the object.

    ``size`` is the width and height of its image in pixels; without it, there is no image.
    """

    file: InputRange
    number: Annotated[int, Meta(ge=1)]
    size: tuple[NonNegative, NonNegative] | None
    has_text: bool


Job = PlanImage | PlanFile | MakeFeatures | ListPages | RenderPage


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
        case RenderPage(size=(width, height)):
            took_ns = _NS_A_PAGES_PIXEL * width * height
        case PlanFile(file=file) | ListPages(file=file) | RenderPage(file=file):
            took_ns = file.nbytes
        case _:
            took_ns = 0
    return _PLAN_US + took_ns // 1000


class Planned(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Object made by a planning job, as msgpack."""

    header: MediaHeader
    plan: FeaturePlan


class DocumentPages(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages of a document: the number of all, and the sizes of the listed ones in pixels."""

    num_pages: NonNegative
    sizes: list[tuple[NonNegative, NonNegative]]


PLAN_NBYTES = 64 << 10
"""Space for a `Planned` or a `DocumentPages`; the unused part is released."""

_LENGTH = struct.Struct("<Q")


def page_nbytes(image_nbytes: int, text_nbytes: int) -> int:
    """Return the bytes of a rendered page: its image, its text, and the length of the image."""
    return image_nbytes + text_nbytes + _LENGTH.size


def write_page(image: bytes, text: bytes, block: memoryview) -> int:
    """Write a rendered page into a block that is large enough; return its bytes."""
    data = np.frombuffer(block, np.uint8)
    at = 0
    for piece in (image, text, _LENGTH.pack(len(image))):
        np.copyto(data[at : at + len(piece)], np.frombuffer(piece, np.uint8))
        at += len(piece)
    return at


def page_of(block: memoryview) -> tuple[memoryview, str]:
    """Return the image of a rendered page, which is a PNG file or empty, and its text."""
    end = len(block) - _LENGTH.size
    (image_nbytes,) = _LENGTH.unpack(block[end:])
    return block[:image_nbytes], str(block[image_nbytes:end], "utf-8")


job_decoder = msgspec.msgpack.Decoder(Job)
planned_decoder = msgspec.msgpack.Decoder(Planned)
pages_decoder = msgspec.msgpack.Decoder(DocumentPages)
