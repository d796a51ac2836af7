"""Measure the cost of a request's body for a frontend, and that of a cached image.

The body has 20 MB of media. The first result is the maximal growth of the heap in the process that
receives it, over loopback. The baseline reads the body whole, parses it with `json` and decodes it
with `base64`, as engines do.

The second result is the processor time of the whole frontend for a PNG whose features `afferent
serve` has in its cache, including an answer of one token. The baseline decodes the image and hashes
its pixels for the lookup, as vLLM does, and answers at once. The lower bound receives the body,
decodes its base64 and digests the bytes.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from afferent.proxy.launch import ENV
from afferent.store.daemon.server import StoreServer
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "What does a body cost a frontend, and what an image that is there already?"
COLUMNS = ("case", "nbytes", "heap_mb", "control_heap_mb", "cpu_ms", "control_cpu_ms", "floor_ms")

_BODY_NBYTES = 20_000_000
_IMAGE_SIDES = (616, 448)  # for a PNG of some 570 kB
_ARENA_NBYTES = 256 * MiB
_NUM_HITS = 20
_GOAL_HEAP_MB, _GOAL_HIT_MS, _GOAL_FLOORS = 4.0, 3.0, 1.6
_JSON = {"content-type": "application/json"}

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    return 7 * (_num_samples(quick=quick) + 1)


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def run(*, quick: bool, after_sample: AfterSample) -> Report:
    report, num_samples = Report("body", QUESTION), _num_samples(quick=quick)
    with (
        StoreServer(_ARENA_NBYTES, shares=DEFAULT_SHARES) as server,
        _host(server.address) as host,
        _frontend() as front,
    ):
        meter = BusyMeter()
        body = _request(bytes(_BODY_NBYTES))
        sides = {
            "heap_mb": lambda: host.heap_mb("/cut", body),
            "control_heap_mb": lambda: host.heap_mb("/parse", body),
            "cpu_ms": lambda: host.cpu_ms("/cut", body, num_times=1),
            "control_cpu_ms": lambda: host.cpu_ms("/parse", body, num_times=1),
        }
        samples = alternate(sides, num_samples=num_samples, after_sample=after_sample)
        report.rows.append(Row({"case": "body", "nbytes": len(body), "floor_ms": ""}, samples))
        hit = _request(_image())
        path = "/v1/chat/completions"
        sides = {
            "cpu_ms": lambda: front.cpu_ms(path, hit, num_times=_NUM_HITS),
            "control_cpu_ms": lambda: host.cpu_ms("/decode", hit, num_times=_NUM_HITS),
            "floor_ms": lambda: host.cpu_ms("/floor", hit, num_times=_NUM_HITS),
        }
        samples = alternate(sides, num_samples=num_samples, after_sample=after_sample)
        keys = {"case": "hit", "nbytes": len(hit), "heap_mb": "", "control_heap_mb": ""}
        report.rows.append(Row(keys, samples))
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    heap_mb, hit_ms = report.rows[0].median("heap_mb"), report.rows[1].median("cpu_ms")
    floors = hit_ms / report.rows[1].median("floor_ms")
    report.goals = [
        Goal(f"heap_mb of the body <= {_GOAL_HEAP_MB:g}", heap_mb <= _GOAL_HEAP_MB, heap_mb),
        Goal(f"cpu_ms of the hit <= {_GOAL_HIT_MS:g}", hit_ms <= _GOAL_HIT_MS, hit_ms),
        Goal(f"the hit <= {_GOAL_FLOORS:g} floors", floors <= _GOAL_FLOORS, floors),
    ]
    return report


class _Server:
    """A process that serves HTTP."""

    def __init__(self, port: int, pid: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._threads = Path(f"/proc/{pid}/task")

    def post(self, path: str, body: bytes) -> dict[str, float]:
        self._connection.request("POST", path, body, _JSON)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {answer[:200]!r}")
        found: dict[str, float] = json.loads(answer)
        return found

    def close(self) -> None:
        self._connection.close()

    def cpu_ms(self, path: str, body: bytes, *, num_times: int) -> float:
        """Return the processor time of the process for one request."""
        self._renew()
        start_ns = self._cpu_ns()
        for _ in range(num_times):
            self.post(path, body)
        return (self._cpu_ns() - start_ns) / num_times / 1e6

    def heap_mb(self, path: str, body: bytes) -> float:
        self._renew()
        self.post("/heap", b"on")
        self.post(path, body)
        return self.post("/heap", b"off")["nbytes"] / 1e6

    def _renew(self) -> None:
        """Reconnect: the server may have closed the connection while another side was measured."""
        self._connection.close()

    def _cpu_ns(self) -> int:
        return sum(
            int((thread / "schedstat").read_text().split()[0]) for thread in self._threads.iterdir()
        )


@contextmanager
def _host(address: str) -> Iterator[_Server]:
    command = [sys.executable, "-m", "benchmarks.body_host", address]
    pipe, env = subprocess.PIPE, {**os.environ, **ENV}  # with a frontend's settings of malloc
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env) as process:
        if process.stdout is None:
            raise RuntimeError("the host has no output")
        with closing(_Server(int(process.stdout.readline()), process.pid)) as host:
            yield host


@contextmanager
def _frontend() -> Iterator[_Server]:
    """Run a server with the built-in model; yield its frontend."""
    command = [sys.executable, "-m", "afferent.cli", "serve", "--port", "0"]
    command += ["--arena-nbytes", str(_ARENA_NBYTES), "--preprocess-workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = _announced_port(process)
            pid = _descendant(process.pid, "afferent.builtin.frontend")
            with closing(_Server(port, pid)) as frontend:
                yield frontend
        finally:
            process.terminate()
            process.communicate()  # read its last output, so that it does not block


def _announced_port(process: subprocess.Popen[str]) -> int:
    for line in process.stderr or ():
        if match := re.search(r"Serving .* on http://[^ /]*:(\d+)/v1", line):
            return int(match[1])
    raise RuntimeError("the server has not started")


def _descendant(pid: int, module: str) -> int:
    """Return the child of a process that runs a module."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if module in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                return child
    raise RuntimeError(f"no child runs {module}")


def _request(data: bytes) -> bytes:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "shapes", "messages": messages, "max_tokens": 1}).encode()


def _image() -> bytes:
    """Return an image of soft blotches with noise, like those of a camera."""
    rng = np.random.default_rng(0)
    width, height = _IMAGE_SIDES
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(_IMAGE_SIDES, Image.Resampling.BICUBIC))
    noisy = np.clip(soft + rng.normal(0, 4, soft.shape), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "PNG")
    return out.getvalue()
