"""What a frontend asks of a preprocess worker: the payload of a job, and a plan in return."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from afferent.ingest.probe import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from afferent.preprocess.plan import FeaturePlan
from afferent.telemetry.trace import declare_stages
from afferent.types import Modality, NonNegative

declare_stages("read_container", "decode", "process")


class _Job(Struct, array_like=True, forbid_unknown_fields=True):
    pass


class PlanImage(_Job, tag="plan image"):
    """What does an image of this size become? Asked where only the model's own processor knows; the
    job has no input.
    """

    header: ImageHeader
    max_pixels: NonNegative = 0


class InputRange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where in the job's input the file lies: the items of a request may share one object."""

    start: NonNegative
    nbytes: NonNegative


class PlanFile(_Job, tag="plan file"):
    """What does this video or audio file become at most? Its container is read where its frames
    are: a worker is confined, a frontend is not.
    """

    modality: Modality
    file: InputRange


class MakeFeatures(_Job, tag="features"):
    """Make the features of a file, which has this header.

    ``max_pixels`` is the request's own limit for an image; 0 for none but the family's.
    """

    header: MediaHeader
    file: InputRange
    max_pixels: NonNegative = 0


Job = PlanImage | PlanFile | MakeFeatures


_PLAN_US = 1_000
_NS_A_PIXEL, _NS_A_FRAMES_PIXEL, _NS_A_SAMPLE, _NS_A_BYTE = 12, 5, 20, 3


def cost_us(job: Job) -> int:
    """About how long a worker works on it, from its header alone: by that workers are shared. What
    it took in the end is what the tenant pays.
    """
    match job:
        case MakeFeatures(ImageHeader(width, height), file):
            took_ns = _NS_A_PIXEL * width * height + _NS_A_BYTE * file.nbytes
        case MakeFeatures(VideoHeader(width, height, num_frames), file):
            took_ns = _NS_A_FRAMES_PIXEL * width * height * num_frames + _NS_A_BYTE * file.nbytes
        case MakeFeatures(AudioHeader(num_channels=num_channels, num_frames=num_frames), file):
            took_ns = _NS_A_SAMPLE * num_channels * num_frames + _NS_A_BYTE * file.nbytes
        case PlanFile(_, file):
            took_ns = file.nbytes
        case _:
            took_ns = 0
    return _PLAN_US + took_ns // 1000


class Planned(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The object that a planning job makes, as msgpack."""

    header: MediaHeader
    plan: FeaturePlan


PLAN_NBYTES = 64 << 10
"""Room for a `Planned`; what it does not use is given back."""

job_decoder = msgspec.msgpack.Decoder(Job)
planned_decoder = msgspec.msgpack.Decoder(Planned)
