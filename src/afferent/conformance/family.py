"""Conformance checks of the promises of `afferent.contracts.Family`, for authors of families.

`CHECKS_OF_FAMILIES` names them. With pytest, for example:

    @pytest.mark.parametrize("name", CHECKS_OF_FAMILIES)
    def test_my_family(name: str) -> None:
        check_family(name, describe(folder, config), sizes=[(64, 48), (1, 300)])

They check what this package relies on for images. Whether the features are those of the model's own
processor is for the author to compare. A broken promise raises `NotConforming`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from afferent.conformance.engine_trial import NotConforming, require
from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, DecodedImage
from afferent.media.families.family import Family
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.jobs import PLAN_NBYTES, Planned
from afferent.types import Modality

Sizes = Sequence[tuple[int, int]]
"""Width and height of images that the model takes."""

_SEED = 1


def check_family(name: str, family: Family, *, sizes: Sizes) -> None:
    """Run one of `CHECKS_OF_FAMILIES`, with images of these sizes.

    Raises:
        NotConforming: The family does not keep that promise.
    """
    if Modality.IMAGE not in family.tokens:
        raise NotConforming("these checks are for families with images")
    CHECKS_OF_FAMILIES[name](family, sizes)


def _plan(family: Family, width: int, height: int) -> FeaturePlan:
    planned = family.plan(ImageHeader(width, height))
    return planned if planned is not None else family.plan_exactly(ImageHeader(width, height))


def _features(family: Family, width: int, height: int, *, fill: int) -> dict[str, Array]:
    """Return the features of a random image, written into memory that holds ``fill``."""
    rng = np.random.default_rng(_SEED)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    specs = _plan(family, width, height).specs
    out = {name: np.full(spec.shape, fill, spec.dtype) for name, spec in specs.items()}
    family.load()
    family.process(DecodedImage(pixels), out)
    return out


def _plans_alike(family: Family, sizes: Sizes) -> None:
    """Check that a plan depends on the header alone, names tokens, and is short."""
    for width, height in sizes:
        planned = _plan(family, width, height)
        require(planned == _plan(family, width, height), "a header has one plan")
        require(planned.num_embeds > 0, "an image becomes at least one row of embeddings")
        sent = msgspec.msgpack.encode(Planned(ImageHeader(width, height), planned))
        require(len(sent) <= PLAN_NBYTES, f"a plan has at most {PLAN_NBYTES} bytes")


def _writes_all_features(family: Family, sizes: Sizes) -> None:
    """Check that each byte of the features is written, and depends on the image alone."""
    for width, height in sizes:
        one, other = (_features(family, width, height, fill=fill) for fill in (0, 1))
        for name, array in one.items():
            require(
                np.array_equal(array, other[name]),
                f"`process` writes all of {name} for {width} x {height}, always alike",
            )


def _travels(family: Family, sizes: Sizes) -> None:
    """Check that a family makes the same features after it was sent to another process."""
    sent = msgspec.msgpack.encode(family.without_paths())
    got = msgspec.msgpack.decode(sent, type=type(family))
    require(got == family.without_paths(), "a family is plain data")
    for width, height in sizes:
        if family.plan(ImageHeader(width, height)) is None:
            continue  # the model's own processor plans it, which needs the folder
        require(_plan(got, width, height) == _plan(family, width, height), "its plans are equal")


def _respects_a_bound(family: Family, sizes: Sizes) -> None:
    """Check that a family with a limit of pixels plans no more rows than without it."""
    for width, height in sizes:
        bounded = family.bounded(max(1, width * height // 4))
        rows = _plan(bounded, width, height).num_embeds
        require(
            rows <= _plan(family, width, height).num_embeds,
            "with a limit of pixels, an image has no more rows",
        )


def _refuses_or_plans(family: Family, sizes: Sizes) -> None:
    """Check that an image of any sides is planned, or refused with `InvalidMedia`."""
    for width, height in [(1, 1), (1, 5000), (5000, 1), (7, 3), *sizes]:
        try:
            _plan(family, width, height)
        except InvalidMedia:
            continue
        except Exception as error:
            raise NotConforming(f"{width} x {height} is planned, or invalid: {error!r}") from error


CHECKS_OF_FAMILIES: dict[str, Callable[[Family, Sizes], None]] = {
    check.__name__[1:]: check
    for check in (
        _plans_alike,
        _writes_all_features,
        _travels,
        _respects_a_bound,
        _refuses_or_plans,
    )
}
