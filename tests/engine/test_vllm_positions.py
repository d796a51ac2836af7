from __future__ import annotations

import math
from typing import Any

import pytest

from afferent.engines.references import FeaturesReference
from afferent.engines.vllm.positions import check_positions
from afferent.errors import FormatError
from afferent.media.families.registry import POSITION_FEATURES
from afferent.types import Handle, Modality

pytestmark = pytest.mark.timeout(30)


def reference(
    small: dict[str, Any], num_embeds: int, modality: Modality = Modality.IMAGE
) -> FeaturesReference:
    prompt = ((9, 1), (5, num_embeds), (8, 1))
    return FeaturesReference(
        modality, bytes(32), Handle(1, 0, 64, 1), 5, 5, prompt, small, math.inf
    )


@pytest.mark.parametrize(
    ("small", "num_embeds", "modality"),
    [
        ({"image_grid_thw": [1, 4, 6]}, 6, Modality.IMAGE),
        ({"video_grid_thw": [3, 4, 6]}, 18, Modality.VIDEO),
        ({"video_grid_thw": [3, 4, 6], "second_per_grid_ts": 0.5}, 18, Modality.VIDEO),
    ],
)
def test_grid_that_fits_the_rows_is_taken(
    small: dict[str, Any], num_embeds: int, modality: Modality
) -> None:
    check_positions(reference(small, num_embeds, modality), POSITION_FEATURES, merge_size=2)


@pytest.mark.parametrize(
    "small",
    [
        {},
        {"image_grid_thw": [1, 4, 8]},
        {"image_grid_thw": [1, 4]},
        {"image_grid_thw": [2, 4, 3]},
        {"image_grid_thw": [1, -4, -6]},
        {"image_grid_thw": [1, 4.0, 6]},
        {"image_grid_thw": 24},
        {"video_grid_thw": [1, 4, 6]},
        {"image_grid_thw": [1, 4, 6], "pixel_values": [1.0]},
        {"image_grid_thw": [1, 4, 6], "second_per_grid_ts": [1.0, 2.0]},
        {"image_grid_thw": [1, 4, 6], "video_grid_thw": [1, 4, 6]},
    ],
)
def test_positions_that_would_end_the_engine_are_refused(small: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        check_positions(reference(small, 6), POSITION_FEATURES, merge_size=2)


def test_model_without_grids_needs_none() -> None:
    check_positions(reference({}, 6), (), merge_size=1)
    with pytest.raises(FormatError):
        check_positions(reference({"image_grid_thw": [1, 4, 6]}, 6), (), merge_size=1)
