"""Files for which vLLM would compute the same features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afferent.engines.vllm.media import TakenMedia
from afferent.engines.vllm.mp4 import decodes_alike
from afferent.media.families.registry import describe
from afferent.types import Modality
from tests.engine import families
from tests.media.folders import make_glm, make_llava, make_qwen
from tests.media_files import make_audio, make_av_audio, make_video, tone, turned

HEARS = TakenMedia(audio_rate_hz=16_000)


@pytest.mark.parametrize(
    ("form", "subtype", "rate_hz", "taken"),
    [
        ("WAV", None, 16_000, True),
        ("WAV", "FLOAT", 16_000, True),
        ("WAVEX", "PCM_24", 16_000, True),
        ("FLAC", None, 16_000, True),
        ("WAV", None, 44_100, False),
        ("FLAC", None, 48_000, False),
        ("WAV", "ULAW", 16_000, False),
        ("OGG", "VORBIS", 16_000, False),
        ("MP3", None, 16_000, False),
    ],
)
def test_audio_at_the_models_rate_that_every_decoder_reads_alike(
    form: str, subtype: str | None, rate_hz: int, taken: bool
) -> None:
    file = make_audio(tone(0.2, rate_hz), rate_hz, form, subtype)
    assert HEARS.takes(Modality.AUDIO, memoryview(file)) is taken
    assert not TakenMedia().takes(Modality.AUDIO, file)
    for length in range(21):
        assert not HEARS.takes(Modality.AUDIO, file[:length])


ALIKE: dict[str, Callable[[], bytes]] = {
    "h264": make_video,
    "hevc": lambda: make_video("hevc"),
    "mov": lambda: make_video(container="mov"),
    "full range": lambda: make_video(pixel_format="yuvj420p"),
    "fragments": lambda: make_video(muxing={"movflags": "frag_keyframe+empty_moov"}),
    "turned": lambda: turned(make_video(), (0, 1, -1, 0)),
}
OTHERS: dict[str, Callable[[], bytes]] = {
    "ten bits": lambda: make_video(pixel_format="yuv420p10le"),
    "ten bits of hevc": lambda: make_video("hevc", pixel_format="yuv420p10le"),
    "4:4:4": lambda: make_video(pixel_format="yuv444p"),
    "av1": lambda: make_video("av1"),
    "webm": lambda: make_video("vp9"),
    "matroska": lambda: make_video(container="matroska"),
    "mirrored": lambda: turned(make_video(), (-1, 0, 0, 1)),
    "audio": lambda: make_av_audio(tone(0.2), 16_000, "aac", "ipod"),
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("name", [*ALIKE, *OTHERS])
def test_videos_whose_frames_are_the_same_for_every_decoder(name: str) -> None:
    file = {**ALIKE, **OTHERS}[name]()
    assert decodes_alike(memoryview(file)) is (name in ALIKE)
    assert TakenMedia(videos=True).takes(Modality.VIDEO, file) is (name in ALIKE)
    assert not TakenMedia().takes(Modality.VIDEO, file)


def test_of_a_broken_video_nothing_is_claimed() -> None:
    file = make_video(num_frames=3)
    movie = file.index(b"moov")
    for length in range(0, len(file), 7):
        assert decodes_alike(file[:length]) in (True, False)
    for at in range(movie, min(movie + 900, len(file))):
        for value in (0, 1, 255):
            assert decodes_alike(file[:at] + bytes([value]) + file[at + 1 :]) in (True, False)
    assert not decodes_alike(file[: movie + 100])


def test_what_is_known_by_its_name_was_taken_before() -> None:
    assert HEARS.takes(Modality.AUDIO, None)
    assert not TakenMedia().takes(Modality.AUDIO, None)
    assert TakenMedia().takes(Modality.IMAGE, None)
    assert TakenMedia(videos=True).takes(Modality.VIDEO, None)
    assert not HEARS.takes(Modality.VIDEO, None)


def test_of_a_model(tmp_path: Path) -> None:
    assert TakenMedia.of(None, tmp_path) == TakenMedia()
    families.make_qwen2_audio(tmp_path)
    assert TakenMedia.of(describe(tmp_path), tmp_path) == HEARS


def test_model_without_video_gets_no_video_files(tmp_path: Path) -> None:
    make_llava(tmp_path)
    assert not TakenMedia.of(describe(tmp_path), tmp_path).video_files
    make_glm(tmp_path)
    assert TakenMedia.of(describe(tmp_path), tmp_path).video_files


@pytest.mark.parametrize(
    ("model_type", "own", "taken"),
    [
        ("qwen2_vl", {}, True),
        ("qwen2_5_vl", {"fps": 2, "max_frames": 768}, True),
        ("qwen2_5_vl", {"fps": 4}, False),
        ("qwen2_5_vl", {"max_frames": 64}, False),
        ("qwen2_5_vl", {"min_frames": 8}, False),
        ("qwen2_5_vl", {"num_frames": 16}, False),
        ("qwen2_5_vl", {"do_sample_frames": False}, False),
        ("qwen3_vl", {}, True),
        ("qwen3_vl", {"size": None}, False),
    ],
)
def test_frames_that_vllm_takes_as_well(
    model_type: str, own: dict[str, Any], taken: bool, tmp_path: Path
) -> None:
    """The server's own limit of frames may be lower."""
    make_qwen(tmp_path, model_type)
    edges = {"size": {"shortest_edge": 4096, "longest_edge": 9_000_000}}
    path = tmp_path / "video_preprocessor_config.json"
    given = {name: value for name, value in {**edges, **own}.items() if value is not None}
    path.write_text(json.dumps(given))
    family = describe(tmp_path, max_sampled_frames=32)
    assert TakenMedia.of(family, tmp_path) == TakenMedia(videos=taken)
