"""Measure the time of requests with a tier, with a broken tier, and without a tier.

The requests ask for features alone (``/v1/chat/completions/render?features=1``), for new
photographs of 1280 x 960, so only fetching and making them is measured. The server without a tier
is the baseline, and alternates with the other one.

- `p99`: one request at a time. The features of `known` photographs were made by a third server and
  are in the tier; those of `new` ones are not. The tier's server is behind a link, shaped or not.
- `broken`: four requests at a time; the result is requests a second in each of seven pairs of
  turns. The tier's server accepts connections and never answers (`hangs`), or each piece of an
  answer arrives half a second late (`is slow`).

Expected before the measurement: `known` faster than without a tier from 10 Gbit/s on; `new` slower
by a lookup, at most 1 ms; the 99th percentile not above that without; a broken tier within the
noise.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import numpy as np

from afferent.errors import ConfigError
from benchmarks.link import Link, link
from benchmarks.pages import photo
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row
from benchmarks.tier import redis_at
from tests.larger import larger_model
from tests.server import Server, wait_until
from tests.tier.servers import BadLink, Fault

QUESTION = "What do requests take with a tier, with one that is broken, and without?"
COLUMNS = ("case", "what", "without", "with_tier", "without_p99", "with_p99")

_NUM, _NUM_QUICK = 300, 60
_NUM_PAIRS = MIN_SAMPLES
_PER_TURN, _AT_ONCE = 24, 4
_T_95 = 2.447
"""Of Student's distribution, for seven pairs."""
_LATE_S = 0.5
_SECRET = "a-secret-of-all-nodes"  # noqa: S105 - of servers that measure
_MOST_OF_P99 = 1.1
_BROKEN = ("hangs", "is slow")
_RATES = 3


def num_steps(*, quick: bool) -> int:
    return 2 * _RATES + len(_BROKEN) * _NUM_PAIRS


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report, meter = Report("fleet", QUESTION), BusyMeter()
    number = _NUM_QUICK if quick else _NUM
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model, net = larger_model(Path(folder)), stack.enter_context(link())
        without = stack.enter_context(Server(str(model)))
        _measure_p99(report, net, model, without, number, after_sample)
        _measure_broken(report, net, model, without, after_sample)
    report.notes = [
        "p99: milliseconds of a request; broken: requests a second",
        "all servers share the machine's cores",
    ]
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


# The 99th percentile


def _measure_p99(
    report: Report,
    net: Link,
    model: Path,
    without: Server,
    number: int,
    after_sample: Callable[[], None],
) -> None:
    with redis_at(net) as port:
        tier = ("--tier", f"redis://{net.host}:{port}", "--fleet-secret", _SECRET)
        with Server(str(model), *tier) as maker, Server(str(model), *tier) as reader:
            for rate in net.rates:
                net.shape(rate)
                for server in (maker, reader):
                    _begin_anew(server)
                known = _known(maker, number)
                for case, shown in (("known", known), ("new", _PHOTOS.some(number))):
                    row = _row(rate or net.name, case, without, reader, shown)
                    report.rows.append(row)
                    report.goals.append(_p99_goal(row))
                    after_sample()


def _begin_anew(server: Server) -> None:
    """Restart the tier process, so that it forgets the measurements of the previous link."""
    old = [process.pid for process in server.find("afferent.tier.main")]
    for process in server.find("afferent.tier.main"):
        process.kill()
    wait_until(
        lambda: (
            [p.pid for p in server.find("afferent.tier.main")] not in ([], old)
            and server.metric("afferent_tier_up") == 1
        )
    )


def _known(maker: Server, number: int) -> list[str]:
    """Return photographs whose features are in the tier, or were not worth a write."""
    shown = _PHOTOS.some(number)
    before = _settled(maker)
    for url in shown:
        _ask(maker, url)
    wait_until(lambda: _settled(maker) >= before + number)
    return shown


def _settled(server: Server) -> float:
    """Return the number of objects whose write was decided."""
    return server.metric("afferent_tier_kept_total") or 0.0


def _row(where: str, case: str, without: Server, reader: Server, shown: Sequence[str]) -> Row:
    sides = {"without": without, "with_tier": reader}
    took: dict[str, list[float]] = {name: [] for name in sides}
    for index, url in enumerate(shown):
        order = list(sides.items())
        for name, server in order if index % 2 else reversed(order):
            took[name].append(_ask(server, url))
    keys = {
        "case": f"p99 {case}",
        "what": where,
        "without_p99": _p99(took["without"]),
        "with_p99": _p99(took["with_tier"]),
    }
    return Row(keys, took)


def _p99(took: Sequence[float]) -> float:
    return round(float(np.percentile(took, 99)), 2)


def _p99_goal(row: Row) -> Goal:
    times = row.keys["with_p99"] / row.keys["without_p99"]
    what = f"{row.keys['what']}, {row.keys['case']}: with / without <= {_MOST_OF_P99:g}"
    return Goal(what, times <= _MOST_OF_P99, times)


# A broken tier


def _measure_broken(
    report: Report, net: Link, model: Path, without: Server, after_sample: Callable[[], None]
) -> None:
    net.shape("")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(redis_at(net))
        bad = stack.enter_context(BadLink(port, host=net.host))
        broken = Server(str(model), "--tier", bad.url, "--fleet-secret", _SECRET)
        stack.enter_context(broken)
        wait_until(lambda: broken.metric("afferent_tier_up") == 1)
        for what in _BROKEN:
            bad.fault = _FAULTS[what]
            sides = {"without": without, "with_tier": broken}
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(_NUM_PAIRS):
                order = list(sides.items())
                for name, server in order if number % 2 else reversed(order):
                    rates[name].append(_rate(server))
                after_sample()
            bad.fault = None
            row = Row({"case": "broken", "what": what}, rates)
            report.rows.append(row)
            report.goals.append(_broken_goal(row))
            _begin_anew(broken)


def _late(piece: bytes) -> bytes:
    time.sleep(_LATE_S)
    return piece


_FAULTS: dict[str, Fault] = {"hangs": lambda _: None, "is slow": _late}


def _rate(server: Server) -> float:
    shown = _PHOTOS.some(_PER_TURN)
    start_s = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda url: _ask(server, url), shown))
    return _PER_TURN / (time.perf_counter() - start_s)


def _broken_goal(row: Row) -> Goal:
    """Return the goal: the 95 % interval of the ratio reaches 1."""
    low, middle, high = interval(row.samples["with_tier"], row.samples["without"])
    what = f"broken, {row.keys['what']}: with / without, 95 % within {low:.3f}..{high:.3f}"
    return Goal(what, high >= 1.0, middle)


def interval(ours: Sequence[float], control: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean ratio of the pairs and its 95 % interval, as (low, geometric mean, high)."""
    logs = [math.log(one / other) for one, other in zip(ours, control, strict=True)]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = mean - _T_95 * error, mean + _T_95 * error
    return math.exp(low), math.exp(mean), math.exp(high)


# For both parts


@dataclass(slots=True)
class _Photos:
    """JPEG files that differ in a comment: to draw new ones would take longer than the requests."""

    numbers: Iterator[int]
    file: bytes = b""

    def some(self, number: int) -> list[str]:
        """Return new photographs as ``data:`` URLs."""
        if not self.file:
            out = io.BytesIO()
            photo(np.random.default_rng(1), 1280, 960).save(out, "JPEG", quality=85)
            self.file = out.getvalue()
        return [self._one(next(self.numbers)) for _ in range(number)]

    def _one(self, number: int) -> str:
        comment = b"\xff\xfe" + (10).to_bytes(2, "big") + number.to_bytes(8, "big")
        data = self.file[:2] + comment + self.file[2:]
        return "data:image/jpeg;base64," + base64.b64encode(data).decode()


_PHOTOS = _Photos(itertools.count(1))


def _ask(server: Server, url: str) -> float:
    """Request the features of an image; return the milliseconds.

    Raises:
        ConfigError: The request has failed.
    """
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "shapes", "messages": [{"role": "user", "content": [part]}]}
    start_s = time.perf_counter()
    answer = httpx.post(
        f"{server.url}/v1/chat/completions/render?features=1", json=body, timeout=60
    )
    if answer.status_code != 200:
        raise ConfigError(f"a request has failed: {answer.text[:300]}")
    return 1e3 * (time.perf_counter() - start_s)
