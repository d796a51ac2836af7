"""Features made in this process, without confinement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from afferent.batch.item_features import Form
from afferent.batch.media_model import MediaModel
from afferent.batch.media_sources import Source, as_our_error, decode_for, read
from afferent.errors import UnsupportedMedia
from afferent.media.decode.audio import decode_audio, probe_audio
from afferent.media.decode.image import read_image_header
from afferent.media.decode.video import open_video
from afferent.media.decoded import Array, DecodedAudio, DecodedImage, Media
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader, MediaHeader, check_size
from afferent.types import ContentKey, Modality


def make(
    model: MediaModel, source: Source, *, form: Form, modality: Modality | None
) -> tuple[dict[str, Array], FeaturePlan, ContentKey | None]:
    """Return the features by `MediaModel.family_for` of a form, their plan, and their key.

    Raises:
        InvalidMedia: The item can't be used.
        UnsupportedModel: The form is not available for the model.
    """
    family = model.family_for(form)
    with as_our_error():
        opened = read(
            source, form=form, sample_rate_hz=model.family.sample_rate_hz, limits=model.limits
        )
        key = None
        if isinstance(opened, memoryview):
            kind = model.modality(opened, modality)
            key, opening = model.key(opened, kind), _opened(model, opened, kind, form)
        else:
            opening = _taken(model, opened)
        with opening as media:
            plan = family.plan_exactly(media.header)
            out = {name: np.empty(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
            family.process(media, out)
        return out, plan, key


def header_of(
    model: MediaModel, source: Source, *, form: Form, modality: Modality | None
) -> MediaHeader:
    """Return the header of an item; no pixel of an encoded one is decoded.

    Raises:
        InvalidMedia: The item can't be used.
    """
    with as_our_error():
        opened = read(
            source, form=form, sample_rate_hz=model.family.sample_rate_hz, limits=model.limits
        )
        if not isinstance(opened, memoryview):
            return _checked(model, opened).header
        match model.modality(opened, modality):
            case Modality.IMAGE:
                return read_image_header(opened, model.limits)
            case Modality.AUDIO:
                return probe_audio(opened, model.limits)
            case _:
                with open_video(opened, model.limits) as video:
                    return video.header


def image_header(model: MediaModel, width: int, height: int) -> ImageHeader:
    """Return the header of an upright image of this size.

    Raises:
        InvalidMedia: It exceeds the limits.
    """
    check_size(width, height, model.limits)
    return ImageHeader(width, height)


@contextlib.contextmanager
def _opened(model: MediaModel, data: memoryview, modality: Modality, form: Form) -> Iterator[Media]:
    limits = model.limits
    match modality:
        case Modality.IMAGE:
            yield decode_for(data, read_image_header(data, limits), limits, form)
        case Modality.AUDIO:
            yield decode_audio(data, model.family.sample_rate_hz, limits)
        case _:
            with open_video(data, limits) as video:
                yield video


@contextlib.contextmanager
def _taken(model: MediaModel, media: DecodedImage | DecodedAudio) -> Iterator[Media]:
    yield _checked(model, media)


def _checked(model: MediaModel, media: DecodedImage | DecodedAudio) -> DecodedImage | DecodedAudio:
    """Return decoded media that the model takes.

    Raises:
        UnsupportedMedia: The model does not take them.
    """
    modality = Modality.IMAGE if isinstance(media, DecodedImage) else Modality.AUDIO
    if modality not in model.family.tokens:
        raise UnsupportedMedia(f"the model takes no {modality}")
    return media
