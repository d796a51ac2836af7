"""Print the rate of a link from which a fetch is faster than making features, as Markdown.

    python -m benchmarks.break_even

The time to make an item is measured here with one thread; the time on a link is computed.
Embeddings are those of a model with rows of 3,584 numbers of 16 bits, one for each token of the
prompt.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile  # type: ignore[import-untyped]

from afferent.config import Limits
from afferent.media.decode.audio import decode_audio, probe_audio
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decode.video import open_video
from afferent.media.families.registry import AnyFamily, describe
from afferent.store.block import codec
from benchmarks.pages import page, photo
from benchmarks.preprocess import write_model
from tests.media_files import make_video

_GBIT_PER_S = (1, 2.5, 10, 25, 100)
_ROW_NBYTES = 3584 * 2
_NUM_SAMPLES = 5
_LATENCY_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Made:
    """One kind of item: the time to make it here, and its size."""

    what: str
    raw_nbytes: int
    make_s: float
    features_nbytes: int
    num_embeds: int

    @property
    def embeddings_nbytes(self) -> int:
        return self.num_embeds * _ROW_NBYTES


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        made = _measure(Path(name))
    _print(made)


def _measure(folder: Path) -> list[_Made]:
    write_model(folder)
    qwen = _family(folder)
    rng, limits = np.random.default_rng(1), Limits()
    items = []
    for what, drawn, format in (
        ("photo, JPEG 644 x 364", photo(rng, 644, 364), "JPEG"),
        ("photo, JPEG 1920 x 1080", photo(rng, 1920, 1080), "JPEG"),
        ("page, PNG 1275 x 1650", page(rng, 1275, 1650), "PNG"),
    ):
        out = io.BytesIO()
        drawn.save(out, format, quality=85)
        raw = memoryview(out.getvalue())
        header = read_image_header(raw, limits)
        decode = partial(decode_image, raw, header, limits)
        items.append(_item(what, raw, qwen, header, decode))
    video = memoryview(make_video(num_frames=300, width=1280, height=720))
    items.append(_video("video, 10 s of 1280 x 720", video, qwen, limits))
    items.append(_clip(folder, rng, limits))
    return items


def _family(folder: Path) -> AnyFamily:
    family = describe(folder)
    if family is None:
        raise SystemExit("the folder describes no family")
    family.load()
    return family


def _item(
    what: str, raw: memoryview, family: AnyFamily, header: Any, decode: Callable[[], Any]
) -> _Made:
    plan = family.plan_exactly(header)
    block = memoryview(bytearray(plan.nbytes))

    def make() -> None:
        views = codec.lay_out(codec.plan(plan.tree), block)
        family.process(decode(), {name: views[name] for name in plan.specs})

    return _Made(what, len(raw), _median_s(make), plan.nbytes, plan.num_embeds)


def _video(what: str, raw: memoryview, family: AnyFamily, limits: Limits) -> _Made:
    with open_video(raw, limits) as opened:
        plan = family.plan_exactly(opened.header)
    block = memoryview(bytearray(plan.nbytes))

    def make() -> None:
        views = codec.lay_out(codec.plan(plan.tree), block)
        with open_video(raw, limits) as media:
            family.process(media, {name: views[name] for name in plan.specs})

    return _Made(what, len(raw), _median_s(make), plan.nbytes, plan.num_embeds)


def _clip(folder: Path, rng: np.random.Generator, limits: Limits) -> _Made:
    """Return half a minute of sound for Whisper's encoder: 1,500 rows."""
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    family = _family(folder)
    out = io.BytesIO()
    samples = (rng.normal(0, 0.1, 30 * 16_000)).astype(np.float32)
    soundfile.write(out, samples, 16_000, format="FLAC")
    raw = memoryview(out.getvalue())
    header = probe_audio(raw, limits)
    rate = family.sample_rate_hz
    made = _item("audio, 30 s", raw, family, header, lambda: decode_audio(raw, rate, limits))
    return _Made(made.what, made.raw_nbytes, made.make_s, made.features_nbytes, 1500)


def _median_s(work: Callable[[], None]) -> float:
    work()
    samples = []
    for _ in range(_NUM_SAMPLES):
        start_s = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples)


def _fetch_ms(nbytes: int, gbit_per_s: float) -> float:
    return 1e3 * (_LATENCY_S + nbytes * 8 / (gbit_per_s * 1e9))


def _print(made: list[_Made]) -> None:
    links = " | ".join(f"{rate:g} Gbit/s" for rate in _GBIT_PER_S)
    print(f"| item | raw | features | make, ms | fetch features, ms: {links} | pays from |")
    print("|---" * (5 + len(_GBIT_PER_S)) + "|")
    for item in made:
        fetched = [_fetch_ms(item.features_nbytes, rate) for rate in _GBIT_PER_S]
        _row(item, item.features_nbytes, fetched)
    print()
    print(f"| item | embeddings | fetch them, ms: {links} |")
    print("|---" * (2 + len(_GBIT_PER_S)) + "|")
    for item in made:
        fetched = [_fetch_ms(item.embeddings_nbytes, rate) for rate in _GBIT_PER_S]
        cells = " | ".join(f"{ms:.1f}" for ms in fetched)
        print(f"| {item.what} | {item.embeddings_nbytes / 1e6:.2f} MB | {cells} |")


def _row(item: _Made, nbytes: int, fetched: list[float]) -> None:
    make_ms = item.make_s * 1e3
    left_s = item.make_s - _LATENCY_S
    least = f"{nbytes * 8 / left_s / 1e9:.2g} Gbit/s" if left_s > 0 else "never"
    cells = " | ".join(f"**{ms:.1f}**" if ms < make_ms else f"{ms:.1f}" for ms in fetched)
    print(
        f"| {item.what} | {item.raw_nbytes / 1e6:.2f} MB | {nbytes / 1e6:.2f} MB | "
        f"{make_ms:.1f} | {cells} | {least} |"
    )


if __name__ == "__main__":
    main()
