"""Time to the first token of an answer about a long PDF.

Each page of the PDF becomes an image of 200 x 200 pixels, and each PDF is a new one. *Plain* pages
have a few words; *drawn* ones also have a line through 2,000 points, which takes some 25 ms to
render, as much as a page of a report. Sides: *ahead* computes the beginning of the prompt while
other pages are rendered; *afterwards*, the baseline, is the same server, and the request has a
small image before the document: so nothing is computed before all pages exist.

A sample is one request, beside no other: ``first_s`` from its start to the first token, ``pages_s``
for the stage that reads the document, ``after_s`` for all the rest of it, and the processor time of
the server.

Expected before the first measurement, which had plain pages alone: ``after_s`` of *ahead* is at
most a quarter of that of *afterwards*, and ``first_s`` at most 0.9 of it: rendering leaves some
time of the two cores. Processor time is the same within 5 %. Before the measurement of drawn
pages, for these the same.
"""

from __future__ import annotations

import base64
import itertools
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx2 as httpx
import msgspec
import numpy as np
import psutil
from PIL import Image

from benchmarks.children import serving
from benchmarks.conversation import cpu_ms
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from tests import pdfs
from tests.images import encoded
from tests.server import data_url, image_part

QUESTION = "How soon does the answer about a long document begin?"
COLUMNS = ("kind", "pages", "side", "first_s", "pages_s", "after_s", "cpu_s")

_SIDES = ("ahead", "afterwards")
_CASES = (("plain", 50), ("plain", 200), ("plain", 500), ("drawn", 200))
_QUICK = (("drawn", 8),)
_NUM_POINTS = 2_000
_READ_STAGE = re.compile(rb'afferent_stage_seconds_sum\{[^}]*stage="documents"[^}]*\} (\S+)')

AfterSample = Callable[[], None]


class _Sample(msgspec.Struct, frozen=True):
    first_s: float
    pages_s: float
    after_s: float
    cpu_s: float


def num_steps(*, quick: bool) -> int:
    return len(_SIDES) * len(_QUICK if quick else _CASES) * (MIN_SAMPLES + 1)


def run(*, quick: bool, after_sample: AfterSample) -> Report:
    """Run the benchmark; ``quick`` has few pages."""
    report, meter, numbers = Report("document", QUESTION), BusyMeter(), itertools.count()
    options = ("--max-document-pages", "500", "--document-content", "images")
    with serving(*options) as (port, processes):
        for kind, num_pages in _QUICK if quick else _CASES:
            documents = _documents(kind, num_pages, numbers)
            sides = {
                "ahead": partial(_asked, port, processes, documents, []),
                "afterwards": partial(_asked, port, processes, documents, [_small_image()]),
            }
            samples = alternate(sides, num_samples=MIN_SAMPLES, after_sample=after_sample)
            for side, found in samples.items():
                columns = {name: [getattr(each, name) for each in found] for name in COLUMNS[3:]}
                keys = {"kind": kind, "pages": num_pages, "side": side}
                report.rows.append(Row(keys, columns))
            ahead, afterwards = report.rows[-2:]
            for what, most in (("after_s", 0.25), ("first_s", 0.9), ("cpu_s", 1.05)):
                ratio = ahead.median(what) / afterwards.median(what)
                goal = f"{num_pages} {kind} pages: {what} at most {most:g} of that afterwards"
                report.goals.append(Goal(goal, ratio <= most, ratio))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _documents(kind: str, num_pages: int, numbers: Iterator[int]) -> Iterator[bytes]:
    """Yield PDFs whose pages all differ."""
    number_of = {"plain": 1, "drawn": _NUM_POINTS}
    points = np.random.default_rng(0).integers(0, 200, (number_of[kind], 2)) // (1, 2) + (0, 100)
    line = b"0.3 w 10 110 m " + b" ".join(b"%d %d l" % (x, y) for x, y in points) + b" S "
    for number in numbers:
        words = (b"%d: %d" % (number, page) for page in range(num_pages))
        yield pdfs.of_contents([line + b"BT /F 18 Tf 20 40 Td (%b) Tj ET" % each for each in words])


def _small_image() -> dict[str, Any]:
    return image_part(data_url(encoded(Image.new("RGB", (28, 28), "red"), "PNG"), "png"))


def _asked(
    port: int,
    processes: list[psutil.Process],
    documents: Iterator[bytes],
    before: list[dict[str, Any]],
) -> _Sample:
    """Send a request whose content begins with some parts."""
    url = f"data:application/pdf;base64,{base64.b64encode(next(documents)).decode()}"
    # 72 dots per inch: a page has 200 points, and so many pixels.
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": url, "dpi": 72}}
    question = {"type": "text", "text": "What is in picture 1?"}
    messages = [{"role": "user", "content": [*before, file, question]}]
    body = {"model": "shapes", "messages": messages, "max_tokens": 1, "stream": True}
    before_s, before_ms = _read_s(port), cpu_ms(processes)
    first_s = _first_token_s(port, body)
    pages_s, spent_ms = _read_s(port) - before_s, cpu_ms(processes) - before_ms
    return _Sample(first_s, pages_s, first_s - pages_s, spent_ms / 1e3)


def _first_token_s(port: int, body: dict[str, Any]) -> float:
    """Return the time to the first token of a request; the answer is read to its end."""
    start_s, first_s = time.perf_counter(), 0.0
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if '"content"' in line and not first_s:
                first_s = time.perf_counter() - start_s
            if '"error"' in line:
                raise RuntimeError(f"a request was answered with {line}")
    if not first_s:
        raise RuntimeError("an answer has no token")
    return first_s


def _read_s(port: int) -> float:
    """Return the time that all documents of a server took."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return sum(float(found) for found in _READ_STAGE.findall(answer.read()))
