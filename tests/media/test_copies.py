"""The number of copies of an item's bytes in preprocessing, from the allocated memory.

Bytes that are written directly into the arena allocate nothing; every other copy does. The counts
are those of `docs/preprocessing.md`.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from afferent.config import Limits
from afferent.media import native
from afferent.media.decode.audio import decode_audio
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decode.video import open_video
from afferent.media.decoded import DecodedImage, Media
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import AnyFamily
from afferent.media.workers.discover import family_of
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.store.block import codec
from tests.images import encoded, oriented, photo
from tests.media.folders import make_qwen
from tests.media_files import make_audio, make_video, tone
from tests.models import make_voxtral

LIMITS = Limits()
WIDTH, HEIGHT = 1275, 1650
PIXELS_NBYTES = 3 * WIDTH * HEIGHT
SLACK = 0.1


def python_nbytes(work: Callable[[], Any]) -> int:
    """Return the peak memory of Python and numpy during ``work``, its result included."""
    work()  # the first call also loads modules
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = work()
        _, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return peak - before


def torch_nbytes(work: Callable[[], Any]) -> int:
    """Return all memory that torch allocated during ``work``, freed or not."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profiled.events())


def num_copies(nbytes: int, size: int) -> int:
    """Return how many objects of this size fit; a tenth of one does not count."""
    return int(nbytes / size + 1 - SLACK)


def in_arena(data: bytes) -> memoryview:
    return memoryview(bytearray(data)).toreadonly()


def write(family: AnyFamily, media: Media) -> tuple[Callable[[], None], int]:
    """Return a function that writes features as a worker does, and their size."""
    plan = codec.plan(family.plan_exactly(media.header).tree)
    block = memoryview(bytearray(plan.nbytes))
    return lambda: family.process(media, codec.lay_out(plan, block)), plan.nbytes


@pytest.fixture
def qwen(tmp_path: Path) -> QwenVlFamily:
    make_qwen(tmp_path)
    family = family_of(tmp_path)
    assert isinstance(family, QwenVlFamily)
    return family


@pytest.mark.parametrize(
    ("format", "mode", "orientation", "copies"),
    [
        ("JPEG", "RGB", 1, 1),
        ("JPEG", "RGB", 6, 2),
        ("JPEG", "L", 1, 1),
        ("PNG", "RGB", 1, 2),  # the rows that are inflated
        ("WEBP", "RGB", 1, 1),
    ],
)
def test_decoding_writes_the_pixels_once_and_again_to_turn_them(
    format: str, mode: str, orientation: int, copies: int
) -> None:
    image = photo(WIDTH, HEIGHT).convert(mode)
    exif = {"exif": oriented(orientation)} if orientation > 1 else {}
    data = in_arena(encoded(image, format, **exif))
    header = read_image_header(bytes(data), LIMITS)
    nbytes = python_nbytes(lambda: decode_image(data, header, LIMITS))
    nbytes -= len(data) if format == "PNG" else 0  # its chunks are joined
    assert num_copies(nbytes, PIXELS_NBYTES) == copies


def test_an_image_is_resized_in_strips_straight_into_patches(qwen: QwenVlFamily) -> None:
    if native.compiled is None:
        pytest.skip("there is no compiled part")
    work, _ = write(qwen, DecodedImage(np.asarray(photo(WIDTH, HEIGHT))))
    assert qwen.resized(WIDTH, HEIGHT) != (WIDTH, HEIGHT)
    assert num_copies(python_nbytes(work), PIXELS_NBYTES) == 0
    assert torch_nbytes(work) == 0


def test_without_the_compiled_part_torchs_image_is_patched_in_place(
    qwen: QwenVlFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "compiled", None)
    width, height = qwen.resized(WIDTH, HEIGHT)
    image = DecodedImage(np.asarray(photo(WIDTH, HEIGHT)))
    work, _ = write(qwen.resizing("torchvision"), image)
    assert num_copies(python_nbytes(work), PIXELS_NBYTES) == 0
    # torch resizes in two passes, with an intermediate result: first the rows, then the columns.
    passes_nbytes = 3 * width * (HEIGHT + height)
    assert torch_nbytes(work) == pytest.approx(passes_nbytes, rel=SLACK)


def test_without_the_compiled_part_pillows_image_is_copied_in_and_out(
    qwen: QwenVlFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "compiled", None)
    work, features_nbytes = write(qwen, DecodedImage(np.asarray(photo(WIDTH, HEIGHT))))
    assert num_copies(python_nbytes(work), min(PIXELS_NBYTES, features_nbytes)) <= 2
    assert torch_nbytes(work) == 0


def test_a_whole_image(qwen: QwenVlFamily) -> None:
    """Decoding and resizing allocate the pixels once, and again without the compiled part."""
    data = in_arena(encoded(photo(WIDTH, HEIGHT), "JPEG"))
    header = read_image_header(bytes(data), LIMITS)
    plan = codec.plan(qwen.plan(header).tree)
    block = memoryview(bytearray(plan.nbytes))

    def work() -> None:
        qwen.process(decode_image(data, header, LIMITS), codec.lay_out(plan, block))

    copies = 2 if native.compiled is None else 1
    assert num_copies(python_nbytes(work), PIXELS_NBYTES) == copies


def test_of_a_video_only_a_few_frames_are_held(tmp_path: Path) -> None:
    family = family_of(BUILT_IN_MODELS / "shapes")
    data = in_arena(make_video(num_frames=64, width=640, height=360, rate=2))
    with open_video(data, LIMITS) as video:
        work, features_nbytes = write(family, video)
        nbytes = python_nbytes(work)
    frame_nbytes = 3 * 640 * 360
    assert features_nbytes > 6 * frame_nbytes
    assert num_copies(nbytes, frame_nbytes) <= 3


def test_audio_is_held_once(tmp_path: Path) -> None:
    make_voxtral(tmp_path)
    family = family_of(tmp_path)
    data = in_arena(make_audio(tone(60.0, 44_100), 44_100, "FLAC"))
    most_nbytes = int(LIMITS.max_audio_s * 16_000 * 4)
    nbytes = python_nbytes(lambda: decode_audio(data, 16_000, LIMITS))
    # The buffer has the maximal length; its unused pages take no memory.
    assert num_copies(nbytes, most_nbytes) == 1
    audio = decode_audio(data, 16_000, LIMITS)
    work, _ = write(family, audio)
    assert num_copies(python_nbytes(work), audio.samples.nbytes) <= 1
