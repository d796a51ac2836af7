"""Cost of a request in a gateway, and whether a repeat reaches the replica that knows its image.

Processor time of all processes of each side, for a short text and for an image of 5 MB of base64,
sent one after the other to eight replicas that only read. Each image comes three times; a gateway
with names sends its repeats without data, and one that streams sends an image while it arrives.
Baselines: a proxy in Python that streams and hashes the first 64 KiB of the image; HAProxy by round
robin; and vllm-router and SMG with their policies for prefix caches (``cache_aware``). A baseline
that is not installed is left out.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2 as httpx
import numpy as np
import psutil

from benchmarks.children import command, free_port, wait_until_it_answers
from benchmarks.record import BusyMeter, Goal, Report, Row, alternate
from tests.images import encoded, photo
from tools import serve_env

QUESTION = "What does a request cost in a gateway?"
_SIDES = ("gateway", "named", "streamed", "control", "haproxy", "vllm_router", "smg")
_ROUTERS = {"vllm_router": ("vllm-router",), "smg": ("smg", "launch")}
_ENVIRONMENT = serve_env.FOLDER / "bin"
COLUMNS = ("body", "side", "cpu_ms", "hits", "replicas")
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
  balance {balance}
{servers}
"""


@dataclass(slots=True)
class Gateway:
    """A gateway, and the replicas that its requests reached.

    Attributes:
        num_hits: Repeats that reached the replica of their image.
    """

    url: str
    process: psutil.Process
    num_repeats: int = 0
    num_hits: int = 0
    reached: set[int] = field(default_factory=set)

    def reset(self) -> None:
        self.num_repeats = self.num_hits = 0
        self.reached.clear()

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
                self.reached.add(replica)
                if key in replica_of:
                    self.num_repeats += 1
                    self.num_hits += replica_of[key] == replica
                replica_of[key] = replica
            return (self.cpu_s() - start_s) / len(bodies) * 1e3


def num_steps(*, quick: bool) -> int:
    return len(_CASES) * (_num_samples(quick=quick) + 1) * (4 + len(installed_baselines()))


def installed_baselines() -> list[str]:
    """Return the sides of other programs that are installed."""
    found = ["haproxy"] if shutil.which("haproxy") else []
    return found + [
        side for side, (program, *_) in _ROUTERS.items() if (_ENVIRONMENT / program).exists()
    ]


def _num_samples(*, quick: bool) -> int:
    return 2 if quick else 7


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report, meter = Report("gateway", QUESTION), BusyMeter()
    with _replicas() as urls, contextlib.ExitStack() as stack:
        sides = {
            "gateway": stack.enter_context(afferent(urls)),
            "named": stack.enter_context(afferent(urls, "--engine-names", "afferent")),
            "streamed": stack.enter_context(afferent(urls, "--engine-stream-nbytes", "1MiB")),
            "control": stack.enter_context(_hashing(urls)),
        }
        for side in installed_baselines():
            started = haproxy(urls) if side == "haproxy" else router(side, urls)
            sides[side] = stack.enter_context(started)
        if missing := [side for side in _SIDES if side not in sides]:
            report.notes.append(f"not installed: {', '.join(missing)}")
        for name, numbers in _CASES.items():
            bodies = bodies_of(name, numbers[quick])
            asked = {side: partial(each.ask, bodies) for side, each in sides.items()}
            samples = alternate(
                asked, num_samples=_num_samples(quick=quick), after_sample=after_sample
            )
            for side, each in sides.items():
                found: dict[str, list[float]] = {
                    "cpu_ms": samples[side],
                    "hits": [each.num_hits / each.num_repeats],
                    "replicas": [len(each.reached)],
                }
                report.rows.append(Row({"body": name, "side": side}, found))
                each.reset()
    cost_ms = _median(report, "text", "gateway")
    report.goals.append(Goal("at most 1 ms for a short text", cost_ms <= 1, cost_ms))
    part = _median(report, "image", "gateway", "hits")
    report.goals.append(Goal("all repeats of an image reach their replica", part == 1, part))
    if "vllm_router" in sides:
        ratio = _median(report, "image", "gateway") / _median(report, "image", "vllm_router")
        goal = "an image of 5 MB: at most half of vllm-router's processor time"
        report.goals.append(Goal(goal, ratio <= 0.5, ratio))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _median(report: Report, body: str, side: str, name: str = "cpu_ms") -> float:
    wanted = {"body": body, "side": side}
    return next(row.median(name) for row in report.rows if row.keys == wanted)


def bodies_of(name: str, number: int) -> list[bytes]:
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
def _running(line: Sequence[str], port: int, path: str = "/health") -> Iterator[Gateway]:
    with tempfile.TemporaryFile() as log, command(line, stdout=log, stderr=log) as popen:
        url = f"http://127.0.0.1:{port}"
        wait_until_it_answers(popen, url + path, timeout_s=_START_TIMEOUT_S, log=f"see {line[0]}")
        yield Gateway(url, psutil.Process(popen.pid))


def afferent(urls: Sequence[str], *more: str) -> contextlib.AbstractContextManager[Gateway]:
    """Run Afferent as a gateway, with more settings."""
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", "--engine", "openai", "--engine-url"]
    line += [",".join(urls), "--port", str(port), "--arena-nbytes", "256MiB", "--frontends", "1"]
    return _running([*line, "--preprocess-workers", "1", *more], port, "/ready")


def _hashing(urls: Sequence[str]) -> contextlib.AbstractContextManager[Gateway]:
    port = free_port()
    line = [sys.executable, "-m", "benchmarks.controls.hashing_proxy", str(port), *urls]
    return _running(line, port)


def router(side: str, urls: Sequence[str]) -> contextlib.AbstractContextManager[Gateway]:
    """Run a router of `installed_baselines`."""
    program = _ROUTERS[side]
    port, metrics = free_port(), free_port()
    line = [str(_ENVIRONMENT / program[0]), *program[1:], "--host", "127.0.0.1"]
    line += ["--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
    return _running([*line, "--policy", "cache_aware", "--worker-urls", *urls], port)


@contextlib.contextmanager
def haproxy(urls: Sequence[str], balance: str = "roundrobin") -> Iterator[Gateway]:
    """Run HAProxy; ``balance`` is how it chooses a server."""
    port = free_port()
    hosts = (url.removeprefix("http://") for url in urls)
    servers = "\n".join(f"  server r{index} {host}" for index, host in enumerate(hosts))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(_HAPROXY.format(port=port, servers=servers, balance=balance))
        with _running(["haproxy", "-db", "-f", str(file)], port) as side:
            yield side
