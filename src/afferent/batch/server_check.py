"""Comparison of a server's workers with this process, before their features are used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np

from afferent import keys
from afferent.batch import in_process
from afferent.batch.media_model import RULES, Backend, MediaModel
from afferent.batch.media_sources import as_file
from afferent.batch.through_store import StoreSteps
from afferent.errors import (
    AfferentError,
    ArenaTooSmall,
    ConfigError,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.media.decoded import Array, DecodedAudio, DecodedImage
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.steps import run
from afferent.types import Modality

_TIMEOUT_S = 60.0
_WORKERS_WITHIN_S = 5.0
_POLL_S = 0.02
_SIZE = (97, 61)
_PLANNED_SIZES = ((640, 480), (1280, 960), (2560, 1920), (5120, 3840), (600, 5400))
_NUM_SAMPLES = 16_000
_NAME = "features-check"


def matching_model(model: MediaModel, address: str, *, backend: Backend | None) -> MediaModel:
    """Return the model with the resizing of the server's workers.

    The workers make the features of a small random item, which are compared with those that this
    process makes by each rule: features of another model, or other settings, would get our keys.
    The plans of larger images are compared, too, because limits of an image's size show there.
    Limits of videos are not compared.

    Args:
        model: The model as this process knows it.
        address: Address of the server's store.
        backend: The only backend to compare with; ``None``: any.

    Raises:
        ConfigError: The server's workers make other features, or none.
        StoreUnavailable: There is no store.
    """
    media = _random_item(model)
    theirs, their_plans = _by_server(model, address, as_file(media, "compact"))
    source = media.pixels if isinstance(media, DecodedImage) else media.samples
    for candidate in _candidates(model, backend):
        ours, _, _ = in_process.make(candidate, source, form="compact", modality=None)
        plans = [candidate.family.plan_exactly(header) for header in _planned_headers(model)]
        if _are_equal(ours, theirs) and their_plans in (plans, []):
            return candidate
    raise ConfigError(
        f"the server of the store {address} makes other features than {model.folder} defines here: "
        "it serves another model, has other settings or versions of libraries"
        + ("" if backend is None else f", or does not resize as backend={backend!r}")
    )


def _candidates(model: MediaModel, backend: Backend | None) -> Iterator[MediaModel]:
    for each in RULES if backend is None else (backend,):
        yield MediaModel.load(model.folder, backend=each, limits=model.limits)


def _random_item(model: MediaModel) -> DecodedImage | DecodedAudio:
    rng = np.random.default_rng()
    if Modality.IMAGE in model.family.tokens:
        width, height = _SIZE
        return DecodedImage(rng.integers(0, 256, (height, width, 3), np.uint8))
    samples = rng.uniform(-0.5, 0.5, _NUM_SAMPLES).astype(np.float32)
    return DecodedAudio(samples, model.family.sample_rate_hz)


def _planned_headers(model: MediaModel) -> list[ImageHeader]:
    """Return headers of images whose plans need no processor of `transformers`, which is slow."""
    sizes = _PLANNED_SIZES if Modality.IMAGE in model.family.tokens else ()
    headers = [ImageHeader(width, height) for width, height in sizes]
    return [each for each in headers if model.family.plan(each) is not None]


def _by_server(
    model: MediaModel, address: str, data: memoryview
) -> tuple[dict[str, Array], list[FeaturePlan]]:
    """Return the features of a file, and `_plans_by_server`."""
    with DaemonStore(address, name=_NAME, writable=True) as store:
        deadline_s = time.monotonic() + _WORKERS_WITHIN_S
        while store.stat().num_workers == 0:  # they start, or are started again
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"the store {address} has no preprocess workers: it is not a server's, or the "
                    "server does not prepare media itself"
                )
            time.sleep(_POLL_S)
        steps = StoreSteps(store, model, timeout_s=_TIMEOUT_S)
        key = keys.frame(b"afferent/check/v1", os.urandom(32))
        (modality, *_) = model.family.tokens
        try:
            submitted = run(steps.submit(data, modality, key=key, may_wait=True))
            arrays, _ = run(steps.collect(submitted))
            plans = _plans_by_server(steps, model)
        except (StoreUnavailable, StoreRestarted):
            raise
        except AfferentError as error:
            raise ConfigError(
                f"the server of the store {address} does not make features of {model.folder}: "
                f"{error.message}"
            ) from error
        store.delete([key])
    return arrays, plans


def _plans_by_server(steps: StoreSteps, model: MediaModel) -> list[FeaturePlan]:
    """Return the plans of `_planned_headers`; none if the store has no space for any plan."""
    try:
        return [run(steps.planned_by_worker(each)) for each in _planned_headers(model)]
    except ArenaTooSmall:
        return []


def _are_equal(ours: dict[str, Array], theirs: dict[str, Array]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and np.array_equal(ours[name], theirs[name])
        for name in ours
    )
