"""Measure the processor time of an image, kernel by kernel, on its way to patches.

All run in one thread of one process, with a worker's settings of malloc:

- `decode` is Afferent's decoder, `pillow` is Pillow's;
- `decode_before` is the PNG decoder until November 2026 (libspng);
- `resize` is the compiled part, which writes patches, and `avx2` its variant for AVX2, if the
  processor has it;
- `libraries` is the same without the compiled part: torch, and numpy for the patches;
- `copy` is the lower bound of everything that writes features.
"""

from __future__ import annotations

import ctypes
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import imagecodecs
import numpy as np
import torch
from PIL import Image

from afferent.config import Limits
from afferent.errors import ConfigError
from afferent.media import native
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import describe
from afferent.types import MiB
from benchmarks.pages import page, photo
from benchmarks.preprocess import write_model
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "What processor time does an image take, kernel by kernel, on its way to patches?"
COLUMNS = (
    *("file", "to", "pillow", "decode_before", "decode", "libraries", "avx2", "resize", "copy"),
    *("main_ms", "avx2_ms", "ms"),
)

_WIDTH, _HEIGHT = 1275, 1650
_SIZES: Final = {"its own size": 12_845_056, "1 megapixel": 1_003_520}
"""Maximal number of pixels after resizing."""
_FILES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "page, PNG": ("page", "PNG", {}),
    "page, JPEG": ("page", "JPEG", {"quality": 85}),
    "page, progressive JPEG": ("page", "JPEG", {"quality": 85, "progressive": True}),
    "page, WebP": ("page", "WEBP", {"quality": 85}),
    "photo, PNG": ("photo", "PNG", {}),
    "photo, JPEG": ("photo", "JPEG", {"quality": 85}),
}
_QUICK_FILES: Final = ("page, PNG", "page, JPEG")
_GOALS: Final = {"page, PNG": 0.65, "page, JPEG": 0.67}
_AVX512_GOAL: Final = 0.67
_MALLOC: Final = {-3: 32 * MiB, -1: 128 * MiB, -2: 16 * MiB}
"""`mallopt`'s thresholds for mmap and for trimming, and its padding, as in a worker."""

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    return sum(_num_sides(name) for name in _files(quick=quick)) * len(_SIZES) * (MIN_SAMPLES + 1)


def _files(*, quick: bool) -> tuple[str, ...]:
    return _QUICK_FILES if quick else tuple(_FILES)


def _num_sides(name: str) -> int:
    return 6 + name.endswith("PNG")


def run(*, quick: bool, after_sample: AfterSample) -> Report:
    if native.compiled is None:
        raise ConfigError("the compiled part is not there: see docs/adr/0034-what-is-compiled.md")
    report, meter, threads = Report("kernels", QUESTION), BusyMeter(), torch.get_num_threads()
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    for parameter, nbytes in _MALLOC.items():
        libc.mallopt(parameter, nbytes)
    try:
        for name in _files(quick=quick):
            for size, max_pixels in _SIZES.items():
                sides = dict(_sides(name, _family(max_pixels)))
                samples = alternate(sides, num_samples=MIN_SAMPLES, after_sample=after_sample)
                report.rows.append(_row(name, size, samples))
    finally:
        torch.set_num_threads(threads)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = list(_goals(report.rows))
    report.notes = ["Milliseconds of processor time; main_ms is without the compiled part."]
    return report


def _row(name: str, size: str, samples: dict[str, list[float]]) -> Row:
    keys: dict[str, Any] = {"file": name, "to": size}
    if "decode_before" not in samples:
        keys["decode_before"] = ""
    for whole, kernel in (("main_ms", "libraries"), ("avx2_ms", "avx2"), ("ms", "resize")):
        samples[whole] = [a + b for a, b in zip(samples["decode"], samples[kernel], strict=True)]
    return Row(keys, samples)


def _goals(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        name, size = row.keys["file"], row.keys["to"]
        if (most := _GOALS.get(name)) is None or size != next(iter(_SIZES)):
            continue
        part = row.median("ms") / row.median("main_ms")
        yield Goal(f"{name}: at most {most:g} of what it took without", part <= most, part)
        if native.variant == "avx512":
            of_avx2 = row.median("resize") / row.median("avx2")
            title = f"{name}: resizing with AVX-512 at most {_AVX512_GOAL:g} of AVX2's time"
            yield Goal(title, of_avx2 <= _AVX512_GOAL, of_avx2)
        if "decode_before" in row.samples:
            before = row.median("decode_before") + row.median("libraries")
            part = row.median("ms") / before
            yield Goal(f"{name}: and of what it took before that", part <= most, part)


def _family(max_pixels: int) -> QwenVlFamily:
    with tempfile.TemporaryDirectory() as name:
        write_model(folder := Path(name))
        settings = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": max_pixels}
        (folder / "preprocessor_config.json").write_text(
            json.dumps(settings | {"min_pixels": 3136})
        )
        family = describe(folder)
    if not isinstance(family, QwenVlFamily):
        raise ConfigError("the benchmark's model is not known")
    return family


def _sides(name: str, family: QwenVlFamily) -> Iterator[tuple[str, Callable[[], float]]]:
    kind, format, parameters = _FILES[name]
    rng, out = np.random.default_rng(0), io.BytesIO()
    drawn = (
        page(rng, _WIDTH, _HEIGHT, figure=0.55) if kind == "page" else photo(rng, _WIDTH, _HEIGHT)
    )
    drawn.save(out, format, **parameters)
    data, limits = out.getvalue(), Limits()
    header = read_image_header(data, limits)
    image = decode_image(memoryview(data), header, limits)
    specs = family.plan(header).specs
    made, copied = (
        {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()} for _ in range(2)
    )

    def processed(**changes: Any) -> None:
        with mock.patch.multiple(native, **changes):
            family.process(image, made)

    yield "pillow", _timed(lambda: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    if format == "PNG":
        yield "decode_before", _timed(lambda: imagecodecs.spng_decode(data))
    yield "decode", _timed(lambda: decode_image(memoryview(data), header, limits))
    yield "libraries", _timed(lambda: processed(compiled=None))
    fastest = native.variant
    avx2 = "avx2" if _has_avx2() else fastest
    yield "avx2", _timed(lambda: processed(variant=avx2))
    yield "resize", _timed(lambda: processed(variant=fastest))
    yield "copy", _timed(lambda: np.copyto(copied["pixel_values"], made["pixel_values"]))


def _has_avx2() -> bool:
    return native.compiled is not None and "avx2" in native.compiled.VARIANTS


def _timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that measures this thread's processor time in milliseconds."""

    def measure() -> float:
        start_ns = time.thread_time_ns()
        work()
        return (time.thread_time_ns() - start_ns) / 1e6

    return measure
