"""Whether pictures that the model has never seen are named, by whichever API."""

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
    """
    Args:
        ask: Sends `QUESTION` with a picture in a format; the answer. Called for all at once.
    """
    drawn = [draw_image(rng) for _ in _FORMATS]
    answers = await asyncio.gather(*map(ask, drawn, _FORMATS))
    right = [said == picture.answer for said, picture in zip(answers, drawn, strict=True)]
    assert sum(right) >= 7, list(zip(answers, drawn, strict=True))
