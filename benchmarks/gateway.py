"""Cost of a request in a gateway, and whether a repeat reaches the replica that knows its image.

Processor time of all processes of each side, for a short text and for an image of 5 MB of base64,
sent one after the other to eight replicas that only read. Each image comes three times; a gateway
with names sends its repeats without data, and one that streams sends an image while it arrives.
Baselines: a proxy in Python that streams and hashes the first 64 KiB of the image, and HAProxy, if
it is installed, by round robin.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2 as httpx
import numpy as np
import psutil

from benchmarks.children import command, free_port, wait_until_it_answers
from benchmarks.record import BusyMeter, Goal, Report, Row, alternate
from tests.images import encoded, photo

QUESTION = "What does a request cost in a gateway?"
_SIDES = ("gateway", "named", "streamed", "control", "haproxy")
COLUMNS = ("body", *(f"{side}_ms" for side in _SIDES), *(f"{side}_hits" for side in _SIDES))
_NUM_REPLICAS, _NUM_REPEATS = 8, 3
_CASES = {"text": (200, 200), "image": (20, 5)}
"""Requests of a sample: in full, and quickly."""
_START_TIMEOUT_S = 120.0
_HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend in
  bind 127.0.0.1:{port}
  http-request return status 200 if {{ path /health }}
  default_backend replicas
backend replicas
  balance roundrobin
{servers}
"""


@dataclass(slots=True)
class _Side:
    """A gateway, and the part of the repeats that reached the replica of their image."""

    url: str
    process: psutil.Process
    num_repeats: int = 0
    num_hits: int = 0

    def cpu_s(self) -> float:
        """Return the processor time of all its processes so far."""
        total = 0.0
        for each in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def ask(self, bodies: Sequence[bytes]) -> float:
        """Send the bodies; return milliseconds of processor time for each."""
        with httpx.Client(timeout=60) as client:
            start_s, replica_of = self.cpu_s(), dict[bytes, int]()
            for body in bodies:
                answer = client.post(
                    f"{self.url}/v1/chat/completions",
                    content=body,
                    headers={"content-type": "application/json"},
                )
                answer.raise_for_status()
                key, replica = body[-100_000:], answer.json()["replica"]
                if key in replica_of:
                    self.num_repeats += 1
                    self.num_hits += replica_of[key] == replica
                replica_of[key] = replica
            return (self.cpu_s() - start_s) / len(bodies) * 1e3


def num_steps(*, quick: bool) -> int:
    return len(_CASES) * (_num_samples(quick=quick) + 1) * (5 if shutil.which("haproxy") else 4)


def _num_samples(*, quick: bool) -> int:
    return 2 if quick else 7


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report, meter = Report("gateway", QUESTION), BusyMeter()
    with _replicas() as urls, contextlib.ExitStack() as stack:
        sides = {
            "gateway": stack.enter_context(_afferent(urls)),
            "named": stack.enter_context(_afferent(urls, "--engine-names", "afferent")),
            "streamed": stack.enter_context(_afferent(urls, "--engine-stream-nbytes", "1MiB")),
            "control": stack.enter_context(_hashing(urls)),
        }
        if shutil.which("haproxy"):
            sides["haproxy"] = stack.enter_context(_haproxy(urls))
        else:
            report.notes.append("HAProxy is not installed")
        for name, numbers in _CASES.items():
            bodies = _bodies(name, numbers[quick])
            asked = {side: partial(each.ask, bodies) for side, each in sides.items()}
            samples = alternate(
                asked, num_samples=_num_samples(quick=quick), after_sample=after_sample
            )
            parts = {side: each.num_hits / each.num_repeats for side, each in sides.items()}
            hits = {
                f"{side}_hits": [part] * _num_samples(quick=quick) for side, part in parts.items()
            }
            found = {f"{side}_ms": times for side, times in samples.items()}
            report.rows.append(Row({"body": name}, {**found, **hits}))
            for each in sides.values():
                each.num_repeats = each.num_hits = 0
    text, image = report.rows
    cost_ms = text.median("gateway_ms")
    report.goals.append(Goal("at most 1 ms for a short text", cost_ms <= 1, cost_ms))
    part = image.median("gateway_hits")
    report.goals.append(Goal("all repeats of an image reach their replica", part == 1, part))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _bodies(name: str, number: int) -> list[bytes]:
    """Return bodies, each of which comes several times."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(-(-number // _NUM_REPEATS)):
        content: object = f"{index} " + "words " * 20
        if name == "image":
            file = encoded(
                photo(1100, 1100, seed=int(rng.integers(1 << 30))), "PNG", compress_level=0
            )
            url = "data:image/png;base64," + base64.b64encode(file).decode()
            content = [{"type": "image_url", "image_url": {"url": url}}]
        messages = [{"role": "user", "content": content}]
        made.append(json.dumps({"model": "m", "messages": messages}).encode())
    return (made * _NUM_REPEATS)[:number]


@contextlib.contextmanager
def _replicas() -> Iterator[list[str]]:
    line = [sys.executable, "-m", "benchmarks.controls.replicas", str(_NUM_REPLICAS)]
    with command(line, stdout=subprocess.PIPE) as popen:
        ports = next(iter(popen.stdout or ())).split()
        yield [f"http://127.0.0.1:{int(port)}" for port in ports]


@contextlib.contextmanager
def _gateway(line: Sequence[str], port: int, path: str = "/health") -> Iterator[_Side]:
    with tempfile.TemporaryFile() as log, command(line, stderr=log) as popen:
        url = f"http://127.0.0.1:{port}"
        wait_until_it_answers(popen, url + path, timeout_s=_START_TIMEOUT_S, log=f"see {line[0]}")
        yield _Side(url, psutil.Process(popen.pid))


def _afferent(urls: Sequence[str], *more: str) -> contextlib.AbstractContextManager[_Side]:
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", "--engine", "openai", "--engine-url"]
    line += [",".join(urls), "--port", str(port), "--arena-nbytes", "256MiB", "--frontends", "1"]
    return _gateway([*line, "--preprocess-workers", "1", *more], port, "/ready")


def _hashing(urls: Sequence[str]) -> contextlib.AbstractContextManager[_Side]:
    port = free_port()
    line = [sys.executable, "-m", "benchmarks.controls.hashing_proxy", str(port), *urls]
    return _gateway(line, port)


@contextlib.contextmanager
def _haproxy(urls: Sequence[str]) -> Iterator[_Side]:
    port = free_port()
    hosts = (url.removeprefix("http://") for url in urls)
    servers = "\n".join(f"  server r{index} {host}" for index, host in enumerate(hosts))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(_HAPROXY.format(port=port, servers=servers))
        with _gateway(["haproxy", "-db", "-f", str(file)], port) as side:
            yield side
