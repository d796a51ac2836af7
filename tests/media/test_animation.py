"""Animated GIF and WebP files as videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.media.decode.animation import open_animation
from afferent.media.decode.video import open_video
from afferent.media.decoded import Pixels
from afferent.media.families.qwen_video import VideoSettings, plan_video
from afferent.media.headers.probe import VideoHeader
from tests import animations
from tests.animations import GifFrame
from tests.images import photo

LIMITS = Limits()
DOT = np.zeros((2, 2), np.uint8)
GOLDEN = Path("tests/media/golden/media")


def frames_of(data: bytes, numbers: Sequence[int] | None = None) -> list[Pixels]:
    """Return the file's own frames, each once, unless ``numbers`` names some."""
    opened = open_animation(memoryview(data), LIMITS)
    shown = opened.shown_at(range(opened.header.num_frames))
    wanted = numbers if numbers is not None else sorted(set(shown))
    return list(opened.frames([shown.index(number) for number in wanted]))


def gif_of(delays: Sequence[int | None]) -> bytes:
    frames = [GifFrame(pixels=DOT + index, delay=each) for index, each in enumerate(delays)]
    return animations.gif((2, 2), frames, animations.palette())


@pytest.mark.parametrize("seed", range(25))
def test_frames_of_a_gif_are_pillows(seed: int) -> None:
    data = animations.drawn_gif(np.random.default_rng(seed))
    expected = animations.pillows_frames(data)
    assert len(expected) == 8
    np.testing.assert_array_equal(frames_of(data), expected)
    np.testing.assert_array_equal(frames_of(data, [2, 7]), [expected[2], expected[7]])


@pytest.mark.parametrize("lossless", [True, False])
def test_frames_of_a_webp_are_pillows(lossless: bool) -> None:
    data = animations.moving_webp(lossless=lossless)
    expected = animations.pillows_frames(data)
    assert (np.array(expected) == 255).any(), "the canvas is transparent"
    np.testing.assert_array_equal(frames_of(data), expected)
    np.testing.assert_array_equal(frames_of(data, [3]), [expected[3]])


@pytest.mark.parametrize("name", ["moving.gif", "moving.webp", "clear.gif", "lossy.webp"])
def test_frames_of_files_from_elsewhere_are_pillows(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    np.testing.assert_array_equal(frames_of(data), animations.pillows_frames(data))


def test_frame_is_shown_for_its_own_duration() -> None:
    opened = open_animation(gif_of([10, 30, 0, 1, 20]), LIMITS)
    assert opened.header == VideoHeader(2, 2, 8, 10.0)
    assert opened.shown_at(range(8)) == [0, 1, 1, 1, 2, 3, 4, 4]
    assert open_animation(gif_of([None, 7]), LIMITS).header == VideoHeader(2, 2, 17, 100.0)
    webp = animations.moving_webp(durations=[250, 50, 50, 50, 50, 50], lossless=True)
    assert open_animation(webp, LIMITS).header == VideoHeader(48, 32, 10, 20.0)


def test_frames_are_sampled_and_stamped_by_their_times() -> None:
    settings = VideoSettings(generation="qwen3", patch_size=16, min_pixels=4096, max_pixels=1 << 20)
    plan = plan_video(settings, open_animation(gif_of([100, 300]), LIMITS).header)
    stamps = [piece for piece in plan.prompt if isinstance(piece, str) and "seconds" in piece]
    assert stamps == [
        *("<0.5 seconds><|vision_start|>",),
        *("<2.5 seconds><|vision_start|>",),
    ]


def test_grid_of_times_is_bounded() -> None:
    data = animations.moving_webp(2, durations=[11, 9973], lossless=True)
    assert open_animation(data, LIMITS).header.num_frames == 9984
    opened = open_animation(data, Limits(max_video_frames=100))
    assert opened.header.num_frames == 100
    assert opened.header.frames_per_s == pytest.approx(100 / 9.984)
    assert opened.shown_at([0, 1, 99]) == [0, 1, 1]


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_still_image_is_a_video_of_one_frame(format: str) -> None:
    data = animations.saved(format, [photo(20, 12)])
    with open_video(memoryview(data), LIMITS) as video:
        assert video.header == VideoHeader(20, 12, 1, 10.0)
        np.testing.assert_array_equal(
            list(video.frames([0, 0])), animations.pillows_frames(data) * 2
        )


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (Limits(max_video_frames=4), "--max-video-frames"),
        (Limits(max_video_s=0.49), "--max-video-s"),
        (Limits(max_frame_pixels=1000), "--max-frame-pixels"),
        (Limits(max_video_decoded_nbytes=3 * 48 * 32 * 5 - 1), "--max-video-decoded-nbytes"),
    ],
)
def test_file_beyond_a_limit_is_refused(limits: Limits, setting: str) -> None:
    frames = [photo(48, 32, seed) for seed in range(5)]
    for format in ("GIF", "WEBP"):
        data = animations.saved(format, frames, duration=100)
        with pytest.raises(MediaTooLarge, match=setting):
            open_animation(data, limits)
        assert open_animation(data, LIMITS).header.num_frames == 5


@pytest.mark.parametrize("at", [(1, 0), (0, 1), (65_000, 65_000)])
def test_frame_outside_of_the_canvas_is_refused_before_it_is_drawn(at: tuple[int, int]) -> None:
    """Pillow would make the canvas larger, without a limit."""
    later = GifFrame(pixels=DOT, at=at)
    with pytest.raises(InvalidMedia, match="outside"):
        open_animation(
            animations.gif((2, 2), [GifFrame(pixels=DOT), later], animations.palette()), LIMITS
        )
    data = animations.gif((1, 1), [later, GifFrame(pixels=DOT)], animations.palette())
    if max(at) < 2:  # the first frame makes the canvas larger, as in Pillow
        np.testing.assert_array_equal(frames_of(data), animations.pillows_frames(data))
    else:
        with pytest.raises(MediaTooLarge, match="--max-frame-pixels"):
            open_animation(data, LIMITS)


@pytest.mark.parametrize(
    ("name", "data"), [pytest.param(*each, id=each[0]) for each in animations.hostile_animations()]
)
def test_hostile_file_is_refused(name: str, data: bytes) -> None:
    def decode() -> list[Pixels]:
        with open_video(memoryview(data), LIMITS) as video:
            return list(video.frames(range(0, video.header.num_frames, 7)))

    if name == "many empty comments":  # Pillow gets none of them
        assert len(decode()) == 1
    else:
        with pytest.raises(InvalidMedia):
            decode()


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_no_view_of_the_file_is_left(format: str) -> None:
    file = bytearray(animations.saved(format, [photo(20, 12, seed) for seed in range(4)]))
    view = memoryview(file)
    with open_video(view, LIMITS) as video:
        assert len(list(video.frames([0, 3]))) == 2
        next(iter(video.frames([0, 3])))
    del video
    with pytest.raises(InvalidMedia), open_video(view[:200], LIMITS):
        pass
    view.release()
    file.clear()  # fails while a view exists


def test_flipped_bytes_are_refused_or_decoded() -> None:
    rng = np.random.default_rng(7)
    files = [animations.drawn_gif(rng), animations.moving_webp(lossless=False)]
    outcomes = set()
    for _ in range(300):
        data = bytearray(files[int(rng.integers(2))])
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        try:
            with open_video(memoryview(data), LIMITS) as video:
                for frame in video.frames([0, video.header.num_frames - 1]):
                    assert frame.shape == (video.header.height, video.header.width, 3)
            outcomes.add("decoded")
        except InvalidMedia:
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}
