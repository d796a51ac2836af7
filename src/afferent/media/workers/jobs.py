"""Jobs of preprocess workers: the payloads that frontends send, and the plans in return."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from afferent.telemetry.trace import declare_stages
from afferent.types import Modality, NonNegative

declare_stages("read_container", "decode", "write_file", "process")


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


Job = PlanImage | PlanFile | MakeFeatures


_PLAN_US = 1_000
_NS_A_PIXEL, _NS_A_FRAMES_PIXEL, _NS_A_SAMPLE, _NS_A_BYTE = 12, 5, 20, 3


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
        case PlanFile(file=file):
            took_ns = file.nbytes
        case _:
            took_ns = 0
    return _PLAN_US + took_ns // 1000


class Planned(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Object made by a planning job, as msgpack."""

    header: MediaHeader
    plan: FeaturePlan


PLAN_NBYTES = 64 << 10
"""Space for a `Planned`; the unused part is released."""

job_decoder = msgspec.msgpack.Decoder(Job)
planned_decoder = msgspec.msgpack.Decoder(Planned)
