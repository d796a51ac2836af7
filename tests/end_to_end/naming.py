"""The check that the model names pictures that it has not seen, for all APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from afferent.conformance.images import DrawnImage, draw_image

QUESTION = "What is in the picture?"
_FORMATS = ("JPEG", "PNG") * 4


async def check_named(
    rng: np.random.Generator, ask: Callable[[DrawnImage, str], Awaitable[str]]
) -> None:
    """Check the answers about new pictures.

    Args:
        ask: Sends `QUESTION` with a picture in a format, and returns the answer. Runs concurrently.
    """
    drawn = [draw_image(rng) for _ in _FORMATS]
    answers = await asyncio.gather(*map(ask, drawn, _FORMATS))
    right = [said == picture.answer for said, picture in zip(answers, drawn, strict=True)]
    assert sum(right) >= 7, list(zip(answers, drawn, strict=True))
