"""Fixtures for the end-to-end tests."""

from __future__ import annotations

import numpy as np
import pytest

from afferent.conformance.images import DrawnImage, draw_image


@pytest.fixture
def pictures(rng: np.random.Generator) -> list[DrawnImage]:
    return [
        draw_image(rng, colour="green", shape="star"),
        draw_image(rng, colour="yellow", shape="triangle"),
    ]
