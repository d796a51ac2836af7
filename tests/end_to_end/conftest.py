"""What the tests of the APIs share."""

from __future__ import annotations

import numpy as np
import pytest

from afferent.testing.pictures import Picture, draw_picture


@pytest.fixture
def pictures(rng: np.random.Generator) -> list[Picture]:
    return [
        draw_picture(rng, colour="green", shape="star"),
        draw_picture(rng, colour="yellow", shape="triangle"),
    ]
