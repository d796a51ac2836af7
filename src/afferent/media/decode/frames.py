"""Frames of videos as images, for models without video."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from afferent.config import Limits
from afferent.media.decode.page import RenderedPage, fitted, png
from afferent.media.decode.reading import Bytes
from afferent.media.decode.video import open_video

_FRAMES_PER_S: Final = 2.0
_LEAST_FRAMES: Final = 4
MOST_FRAMES: Final = 32
"""Most frames of a video as images: a frame has as many tokens as an image."""


def frame_sizes(data: Bytes, limits: Limits) -> dict[int, tuple[int, int]]:
    """Return the frames that become images: evenly spaced, two of each second.

    They are at least four, if there are so many, and at most `MOST_FRAMES`,
    ``max_sampled_frames`` and ``max_document_pages``.

    Returns:
        ``(width, height)`` of the image in pixels, by the number of the frame from 1 on.

    Raises:
        AfferentError: As from `open_video`.
        MediaTooLarge: A side is too long for the other.
    """
    with open_video(data, limits) as video:
        header = video.header
    total = header.num_frames
    most = min(MOST_FRAMES, limits.max_sampled_frames, limits.max_document_pages, total)
    count = min(max(int(total / header.frames_per_s * _FRAMES_PER_S), _LEAST_FRAMES), most)
    indices = np.linspace(0, total - 1, count).round().astype(int).tolist()
    size = fitted(header.width, header.height, 1.0, limits)
    return {index + 1: size for index in indices}


def render_frames(
    data: Bytes, frames: Sequence[tuple[int, tuple[int, int]]], limits: Limits
) -> Iterator[RenderedPage]:
    """Yield frames as images, from one pass over the video; the same frame gives the same bytes.

    Args:
        frames: Number of each frame, ascending, with the width and height of its image.

    Raises:
        AfferentError: As from `open_video`, and from the video's ``frames``.
    """
    with open_video(data, limits) as video:
        decoded = video.frames([number - 1 for number, _ in frames])
        for (_, size), pixels in zip(frames, decoded, strict=True):
            yield RenderedPage(png(pixels, size), b"")
