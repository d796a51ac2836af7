"""What a frontend asks of a preprocess worker: the payload of a job, and a plan in return."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from afferent.ingest.probe import ImageHeader, MediaHeader
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


class Planned(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The object that a planning job makes, as msgpack."""

    header: MediaHeader
    plan: FeaturePlan


PLAN_NBYTES = 64 << 10
"""Room for a `Planned`; what it does not use is given back."""

job_decoder = msgspec.msgpack.Decoder(Job)
planned_decoder = msgspec.msgpack.Decoder(Planned)
