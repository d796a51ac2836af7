"""Frames of videos as images."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.media.decode.frames import MOST_FRAMES, frame_sizes, render_frames
from afferent.media.decode.video import open_video
from afferent.media.decoded import Pixels
from tests import animations
from tests.images import photo
from tests.media_files import make_video

LIMITS = Limits()


def images(data: bytes, limits: Limits = LIMITS) -> list[Pixels]:
    sized = list(frame_sizes(data, limits).items())
    rendered = list(render_frames(data, sized, limits))
    assert all(each.text == b"" for each in rendered)
    return [np.asarray(Image.open(io.BytesIO(each.image))) for each in rendered]


def test_two_frames_of_each_second_are_those_of_the_decoder() -> None:
    data = make_video(num_frames=90)
    numbers = [1, 19, 37, 54, 72, 90]
    assert frame_sizes(data, LIMITS) == dict.fromkeys(numbers, (160, 96))
    with open_video(data, LIMITS) as video:
        expected = list(video.frames([number - 1 for number in numbers]))
    np.testing.assert_array_equal(images(data), expected)


def test_frames_of_an_animation_are_pillows() -> None:
    data = animations.saved("GIF", [photo(40, 30, seed) for seed in range(6)], duration=500)
    np.testing.assert_array_equal(images(data), animations.pillows_frames(data))


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        (LIMITS, MOST_FRAMES),
        (Limits(max_sampled_frames=5), 5),
        (Limits(max_document_pages=7), 7),
    ],
)
def test_number_of_frames_is_limited(limits: Limits, count: int) -> None:
    sizes = frame_sizes(make_video(num_frames=100, rate=4), limits)
    assert len(sizes) == count
    assert (min(sizes), max(sizes)) == (1, 100)


def test_short_video_has_four_frames_or_all() -> None:
    assert list(frame_sizes(make_video(num_frames=10), LIMITS)) == [1, 4, 7, 10]
    assert list(frame_sizes(make_video(num_frames=2), LIMITS)) == [1, 2]


def test_large_frame_is_made_smaller() -> None:
    data = animations.saved("WEBP", [photo(400, 200)] * 2)
    limits = Limits(max_page_pixels=20_000)
    assert set(frame_sizes(data, limits).values()) == {(200, 100)}
    assert {each.shape for each in images(data, limits)} == {(100, 200, 3)}


def test_frame_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(MediaTooLarge, match="--max-image-aspect"):
        frame_sizes(animations.saved("GIF", [photo(8, 402)]), Limits(max_image_aspect=50))


def test_truncated_video_is_refused() -> None:
    with pytest.raises(InvalidMedia):
        frame_sizes(make_video(num_frames=10)[:900], LIMITS)
