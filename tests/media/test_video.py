"""Videos: the decoded frames, and the features of Qwen-VL's video processors."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media.decode.mp4 import check_tables
from afferent.media.decode.video import open_video
from afferent.media.decoded import Pixels
from afferent.media.families.qwen_video import (
    Generation,
    VideoSettings,
    plan_video,
    process_video,
    resized,
    sampled_indices,
    video_settings,
)
from afferent.media.headers.probe import VideoHeader
from afferent.media.transforms.resize import Resampling
from tests.media_files import ENCODERS, drawn_frame, make_av_audio, make_video, tone, turned

LIMITS = Limits()
GENERATIONS: tuple[Generation, ...] = ("qwen2", "qwen2_5", "qwen3")


def reference_frames(file: bytes) -> list[Pixels]:
    """Decode all frames one after another."""
    with av.open(io.BytesIO(file)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("container", ["", "matroska"])
@pytest.mark.parametrize("codec", ENCODERS)
def test_frames_are_those_of_a_plain_decoder(codec: str, container: str) -> None:
    file = memoryview(make_video(codec, container=container, num_frames=40))
    expected = reference_frames(bytes(file))
    with open_video(file, LIMITS) as video:
        assert video.header == VideoHeader(160, 96, 40, 30.0)
        for indices in ([0], [39], [0, 0, 7, 13, 14, 30, 39, 39], [11, 12, 13], range(40)):
            frames = list(video.frames(indices))
            assert len(frames) == len(indices)
            for index, frame in zip(indices, frames, strict=True):
                np.testing.assert_array_equal(frame, expected[index])
                assert np.abs(frame.astype(int) - drawn_frame(index)).mean() < 5


def test_open_groups_of_pictures() -> None:
    """The frames that lead to a keyframe need the frames before it."""
    options = {"x264-params": "open-gop=1:bframes=3:b-adapt=0:scenecut=0"}
    file = make_video(num_frames=60, gop=10, options=options)
    expected = reference_frames(file)
    with open_video(file, LIMITS) as video:
        for first in range(60):
            indices = [first, *range(first + 17, 60, 13)]
            for index, frame in zip(indices, video.frames(indices), strict=True):
                np.testing.assert_array_equal(frame, expected[index])


def test_fragmented_and_10_bit() -> None:
    file = make_video(muxing={"movflags": "frag_keyframe+empty_moov"}, pixel_format="yuv420p10le")
    assert b"moof" in file
    expected = reference_frames(file)
    with open_video(file, LIMITS) as video:
        for frame, wanted in zip(video.frames(range(32)), expected, strict=True):
            np.testing.assert_array_equal(frame, wanted)


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((0, 1, -1, 0), lambda pixels: np.rot90(pixels, -1)),
        ((-1, 0, 0, -1), lambda pixels: np.rot90(pixels, 2)),
        ((0, -1, 1, 0), lambda pixels: np.rot90(pixels, 1)),
        ((-1, 0, 0, 1), lambda pixels: pixels[:, ::-1]),
        ((1, 0, 0, -1), lambda pixels: pixels[::-1]),
        ((0, 1, 1, 0), lambda pixels: pixels.transpose(1, 0, 2)),
    ],
)
def test_frames_are_upright(matrix: tuple[int, int, int, int], turn: Any) -> None:
    plain = make_video(num_frames=4)
    file = turned(plain, matrix)
    expected = turn(reference_frames(plain)[2])
    height, width = expected.shape[:2]
    with open_video(file, LIMITS) as video:
        assert video.header == VideoHeader(width, height, 4, 30.0)
        (frame,) = video.frames([2])
    np.testing.assert_array_equal(frame, expected)
    assert frame.flags.c_contiguous


def test_limits() -> None:
    file = make_video(num_frames=31)
    for limits, named in (
        (Limits(max_video_frames=30), "--max-video-frames"),
        (Limits(max_video_s=0.9), "--max-video-s"),
        (Limits(max_frame_pixels=160 * 96 - 1), "--max-frame-pixels"),
    ):
        with pytest.raises(MediaTooLarge, match=named), open_video(file, limits):
            pass
    with open_video(file, Limits(max_video_decoded_nbytes=160 * 96 * 3 * 2)) as video:
        assert len(list(video.frames([1, 1, 5]))) == 3
        with pytest.raises(MediaTooLarge, match="--max-video-decoded-nbytes"):
            video.frames([1, 2, 3])


def test_a_container_without_a_length() -> None:
    """Recordings of a browser have no length."""
    file = make_video("vp9", container="webm", options={})
    with open_video(file.replace(b"\x44\x89\x88", b"\xec\x88\x88"), LIMITS) as video:
        assert video.header.num_frames == 32


def test_nothing_holds_on_to_the_bytes() -> None:
    """The file is in shared memory, which is reused for other files."""
    file = bytearray(make_video(num_frames=12))
    view = memoryview(file)
    with open_video(view, LIMITS) as video:
        assert len(list(video.frames([0, 5]))) == 2
        next(iter(video.frames([0, 5])))
    with pytest.raises(InvalidMedia), open_video(view[:500], LIMITS):
        pass
    view.release()
    file.clear()  # fails while a view exists


def test_pcm_beside_a_video_is_not_counted_sample_by_sample() -> None:
    check_tables(make_av_audio(tone(30.0, 48_000), 48_000, "pcm_s16le", "mov"))


def test_what_is_no_video() -> None:
    for file in (
        b"",
        b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"\0\0\0\x18ftypheic" + bytes(100),
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    ):
        with pytest.raises(UnsupportedMedia), open_video(file, LIMITS):
            pass
    with (
        pytest.raises(InvalidMedia),
        open_video(make_av_audio(tone(1.0), 16_000, "aac", "ipod"), LIMITS),
    ):
        pass


def test_frames_that_cannot_be_decoded() -> None:
    file = bytearray(make_video(num_frames=24))
    start = file.index(b"mdat") + 2000
    file[start : start + 1000] = bytes(1000)
    with open_video(file, LIMITS) as video, pytest.raises(InvalidMedia):
        list(video.frames(range(24)))


def test_a_size_that_changes() -> None:
    file = bytearray(make_video(num_frames=24, gop=12))
    other = make_video(num_frames=24, gop=12, width=176)
    with open_video(file, LIMITS) as video:
        assert len(list(video.frames([0, 23]))) == 2
    # In Matroska, each keyframe can have new parameters: write two streams, one after the other.
    both = io.BytesIO()
    with av.open(both, "w", format="matroska") as out:
        for number, part in enumerate((bytes(file), other)):
            with av.open(io.BytesIO(part)) as source:
                if number == 0:
                    stream = out.add_stream_from_template(source.streams.video[0])
                headers = source.streams.video[0].codec_context.extradata
                for packet in source.demux(video=0):
                    if packet.size:
                        if number and packet.is_keyframe:
                            packet = _with_headers(packet, headers)
                        packet.stream = stream
                        packet.pts += number * 24 * 512
                        packet.dts = None if packet.dts is None else packet.dts + number * 12_288
                        out.mux(packet)
    with open_video(both.getvalue(), LIMITS) as video:
        list(video.frames([0, 10]))
        with pytest.raises(InvalidMedia):
            list(video.frames([0, 40]))


def _with_headers(packet: av.Packet, extradata: bytes | None) -> av.Packet:
    """Return the packet behind the parameter sets from an ``avcC`` box."""
    data = extradata or b""
    sps_nbytes = int.from_bytes(data[6:8], "big")
    pps_at = 8 + sps_nbytes + 1
    sps, pps = data[8 : 8 + sps_nbytes], data[pps_at + 2 :]
    pps = pps[: int.from_bytes(data[pps_at : pps_at + 2], "big")]
    units = b"".join(len(unit).to_bytes(4, "big") + unit for unit in (sps, pps))
    changed = av.Packet(units + bytes(packet))
    changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
    changed.is_keyframe = True
    return changed


BICUBIC = Resampling(3)


class FakeVideo:
    def __init__(self, frames: list[Pixels], frames_per_s: float) -> None:
        height, width = frames[0].shape[:2]
        self._frames = frames
        self.header = VideoHeader(width, height, len(frames), frames_per_s)

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        for index in indices:
            yield self._frames[index]


Ask = Callable[[list[tuple[str, list[Any]]]], list[Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Start `tests.media.qwen_video_reference`; yield a function that asks it."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.media.qwen_video_reference"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        questions, answers = child.stdin, child.stdout

        def put(asked: list[tuple[str, list[Any]]]) -> list[Any]:
            questions.write(json.dumps(asked).encode() + b"\n")
            questions.flush()
            answered: list[Any] = json.loads(answers.readline())
            return answered

        yield put


def default_settings(generation: Generation, **given: Any) -> VideoSettings:
    return video_settings(given, generation)


def as_dict(settings: VideoSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_sampled_frames(ask: Ask) -> None:
    rng = np.random.default_rng(0)
    cases = []
    for generation in GENERATIONS:
        for given in ({}, {"fps": 1}, {"num_frames": 16}, {"max_frames": 32, "min_frames": 8}):
            settings = default_settings(generation, **given)
            for total in (2, 3, 4, 5, 31, 60, 300, *rng.integers(16, 36_000, 20).tolist()):
                cases += [
                    (settings, VideoHeader(160, 96, total, rate))
                    for rate in (30.0, 29.97, 24.0, 7.5)
                    if total >= (settings.num_frames or 0)
                ]
    answers = ask(
        [("sampled", [s.generation, as_dict(s), h.num_frames, h.frames_per_s]) for s, h in cases]
    )
    num_different = 0
    for (settings, header), expected in zip(cases, answers, strict=True):
        indices = sampled_indices(settings, header)
        assert len(indices) == len(expected)
        # The last bit of torch's float32 sequences depends on the vector width of the machine.
        assert max(abs(a - b) for a, b in zip(indices, expected, strict=True)) <= 1
        num_different += indices != expected
        assert settings.generation != "qwen3" or indices == expected
    assert num_different <= len(cases) // 100


def test_sampling_has_bounds() -> None:
    for generation in GENERATIONS:
        settings = default_settings(generation)
        assert sampled_indices(settings, VideoHeader(8, 8, 1, 30.0)) == [0]
        assert len(sampled_indices(settings, VideoHeader(8, 8, 36_000, 0.001))) <= 768
        every = default_settings(generation, do_sample_frames=False)
        assert sampled_indices(every, VideoHeader(8, 8, 50, 30.0)) == list(range(50))
        assert len(sampled_indices(every, VideoHeader(8, 8, 5000, 30.0))) == 768


def test_sizes(ask: Ask) -> None:
    rng = np.random.default_rng(1)
    cases = []
    for generation in GENERATIONS:
        for capped in (False, True):
            settings = default_settings(generation, cap_pixels_per_frame=capped)
            for frames in (2, 3, 4, 7, 64, 200, 768):
                sides = (2 ** rng.uniform(1, 12.5, (30, 2))).astype(int).tolist()
                cases += [(settings, frames, VideoHeader(*size, frames, 30.0)) for size in sides]
    answers = ask(
        [
            ("size", [s.generation, as_dict(s), n, h.height, h.width, s.cap_pixels_per_frame])
            for s, n, h in cases
        ]
    )
    for (settings, frames, header), expected in zip(cases, answers, strict=True):
        if expected is None:
            with pytest.raises(InvalidMedia):
                resized(settings, frames, header)
        else:
            assert resized(settings, frames, header) == tuple(expected)


def test_features(ask: Ask, tmp_path: Path) -> None:
    given = {"size": {"shortest_edge": 4000, "longest_edge": 60_000}}
    questions: list[tuple[str, list[Any]]] = []
    made = []
    for generation in GENERATIONS:
        for num_frames in (2, 9, 33):
            frames = [drawn_frame(index, 300, 170) for index in range(num_frames)]
            video = FakeVideo(frames, 5.0)
            settings = default_settings(generation, **given)
            planned = plan_video(settings, video.header)
            out = {name: np.zeros(spec.shape, spec.dtype) for name, spec in planned.specs.items()}
            process_video(settings, video, out, BICUBIC)
            indices = sampled_indices(settings, video.header)
            size = resized(settings, len(indices), video.header)
            assert size != (170, 300)
            file = tmp_path / f"{len(questions)}.npy"
            expected = [BICUBIC.resize(frames[index], *size[::-1]) for index in indices]
            np.save(file, np.stack(expected))
            questions.append(("patches", [str(file), settings.patch_size]))
            questions.append(("prompt", [indices, 5.0, out["video_grid_thw"][0].tolist()]))
            made.append((generation, planned, out, file, len(indices) / num_frames * 5.0))
    answers = ask(questions)
    for (generation, planned, out, file, fps), grid, text in zip(
        made, answers[::2], answers[1::2], strict=True
    ):
        assert out["video_grid_thw"].tolist() == [grid]
        np.testing.assert_array_equal(out["pixel_values_videos"], np.load(file))
        assert planned.num_embeds == math.prod(grid) // 4
        if generation == "qwen3":
            written = "".join("x" * p if isinstance(p, int) else p for p in planned.prompt)
            assert written.replace("<|vision_start|>", "[").replace("<|vision_end|>", "]") == text
        else:
            assert planned.prompt == (planned.num_embeds,)
        if generation == "qwen2_5":
            np.testing.assert_allclose(out["second_per_grid_ts"], [2 / fps], rtol=1e-6)
