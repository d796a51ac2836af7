"""Time to an answer about photographs whose body arrives slowly.

A request has eight JPEG photographs of 12 megapixels, new ones each time, and its client sends them
at a fixed rate. Sides: *early* begins an image as soon as its last byte is there; *at the end*, the
baseline, is the same server with the same body, whose first field names an option of the processor,
so that it waits for the whole body.

A sample is one request, beside no other: ``after_ms`` from the last byte of the body to the first
byte of the answer, ``all_ms`` from the first byte of the body on, and the processor time of the
server.

Expected before the measurement: with 20 MB/s the answer comes after the time for one image rather
than eight; with 1 GB/s nothing changes. Processor time grows by 2 %, for the copies.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import psutil

from benchmarks.children import serving
from benchmarks.conversation import cpu_ms
from benchmarks.pages import photo
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from tests.server import ask, data_url

QUESTION = "How early is the answer about a body that arrives slowly?"
COLUMNS = ("side", "mb_per_s", "after_ms", "all_ms", "cpu_ms")

_SIDES: dict[str, dict[str, object]] = {"early": {}, "at the end": {"mm_processor_kwargs": {}}}
_RATES = (20, 100, 1000)
_NUM_IMAGES = 8
_WIDTH, _HEIGHT = 4000, 3000
_NUM_DRAWN = 2
_PIECE_NBYTES = 64 << 10

AfterSample = Callable[[], None]


class _Sample(msgspec.Struct, frozen=True):
    after_ms: float
    all_ms: float
    cpu_ms: float


def num_steps(*, quick: bool) -> int:
    return len(_SIDES) * len(_RATES) * (_num_samples(quick=quick) + 1)


def run(*, quick: bool, after_sample: AfterSample, height: int = _HEIGHT) -> Report:
    """Run the benchmark with photographs of this height."""
    report = Report("early", QUESTION)
    photos, meter = _photos(height), BusyMeter()
    with serving("--arena-nbytes", "2GiB", "--max-body-nbytes", "128MiB") as (port, processes):
        for rate in _RATES:
            sides = {
                side: partial(_asked, port, processes, photos, rate, options)
                for side, options in _SIDES.items()
            }
            samples = alternate(
                sides, num_samples=_num_samples(quick=quick), after_sample=after_sample
            )
            for side, found in samples.items():
                columns = {name: [getattr(each, name) for each in found] for name in COLUMNS[2:]}
                report.rows.append(Row({"side": side, "mb_per_s": rate}, columns))
            early, late = samples["early"], samples["at the end"]
            ratio = statistics.median(
                each.after_ms / other.after_ms for each, other in zip(early, late, strict=True)
            )
            if rate == _RATES[0]:
                report.goals.append(Goal(f"{rate} MB/s: after_ms at most 0.3", ratio <= 0.3, ratio))
            ratio = statistics.median(
                each.cpu_ms / other.cpu_ms for each, other in zip(early, late, strict=True)
            )
            report.goals.append(Goal(f"{rate} MB/s: cpu_ms at most 1.05", ratio <= 1.05, ratio))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 7


def _photos(height: int) -> Iterator[bytes]:
    """Yield files that all differ, by a comment at their end, which a decoder skips."""
    drawn = []
    for seed in range(_NUM_DRAWN):
        file = io.BytesIO()
        photo(np.random.default_rng(seed), _WIDTH, height).save(file, "JPEG", quality=92)
        drawn.append(file.getvalue())
    return (drawn[number % _NUM_DRAWN] + b"%d" % number for number in itertools.count())


def _asked(
    port: int,
    processes: list[psutil.Process],
    photos: Iterator[bytes],
    rate: int,
    options: dict[str, object],
) -> _Sample:
    urls = [data_url(file) for file in itertools.islice(photos, _NUM_IMAGES)]
    body = json.dumps({**options, **ask(urls, "What?", max_tokens=1)}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        before_ms, start_s = cpu_ms(processes), time.perf_counter()
        for sent in range(0, len(body), _PIECE_NBYTES):
            late_s = start_s + sent / (rate * 1e6) - time.perf_counter()
            if late_s > 0:
                time.sleep(late_s)
            connection.send(body[sent : sent + _PIECE_NBYTES])
        sent_s = time.perf_counter()
        answer = connection.getresponse()
        text, end_s = answer.read(), time.perf_counter()
    if answer.status != 200:
        raise RuntimeError(f"a request was answered with {text[:500]!r}")
    return _Sample(1e3 * (end_s - sent_s), 1e3 * (end_s - start_s), cpu_ms(processes) - before_ms)
