"""Let system calls fail, each once, in each process of a server, and check the outcome.

    python -m tests.end_to_end.error_sweep --only store --calls 5

For each kind of process, system call and possible error, the first, second, ... call fails
(`strace --inject`): while requests are served, and while a killed process starts again. A finding
is one of these:

- an answer that differs from the undisturbed one
- an error that is not retryable
- a request without an answer
- a server that does not recover
- an object that is pinned at the end

The sweep needs strace (on Debian: apt-get install strace) and the right to trace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx2 as httpx
import numpy as np
import psutil

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.end_to_end.test_kill_storm import FAILURES, assert_nothing_is_held, find_victims
from tests.server import Server, ask, data_url, wait_until

ERRORS = {
    "sendto": ("ECONNRESET", "ENOBUFS"),
    "sendmsg": ("ECONNRESET", "ENOBUFS"),
    "recvfrom": ("ECONNRESET", "ENOMEM"),
    "recvmsg": ("ECONNRESET", "EMFILE"),
    "accept4": ("ECONNABORTED", "EMFILE"),
    "connect": ("ECONNREFUSED", "EAGAIN"),
    "socket": ("EMFILE",),
    "mmap": ("ENOMEM",),
    "madvise": ("ENOMEM",),
    "fallocate": ("ENOSPC", "ENOMEM"),
    "ftruncate": ("ENOMEM",),
    "memfd_create": ("EMFILE",),
    "openat": ("EMFILE", "ENOMEM"),
    "read": ("EIO",),
    "write": ("ENOSPC", "EPIPE"),
    "pipe2": ("EMFILE",),
    "pidfd_open": ("EMFILE",),
    "epoll_ctl": ("ENOMEM",),
    "clone": ("EAGAIN", "ENOMEM"),
    "clone3": ("EAGAIN",),
    "prctl": ("EINVAL",),
}
REQUEST_TIMEOUT_S = 60.0
BACK_TIMEOUT_S = 90.0
_MOST_FILES = 4096
TRACED_START_S = 3.0
"""The time for which calls fail while a process starts again; then it has to start."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The failure of the ``number``-th call of a process of this kind, counted from 1."""

    kind: str
    call: str
    error: str
    number: int
    at_start: bool

    def __str__(self) -> str:
        when = "start" if self.at_start else "work"
        return f"{self.kind}: {self.call} {self.number} {self.error} ({when})"


class Stuck(Exception):
    """strace does not detach from a process, so the fault has no result."""


class NotAsBefore(Exception):
    """After a fault, the server does not recover, or pins something."""


class Sweep:
    """A server, and the findings about it and about the servers that it has replaced."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.findings: list[str] = []
        self.num_faults = self.num_hit = self.num_stuck = 0
        self._seed = 0
        self._stack = ExitStack()
        self._client = plain_http.Client(timeout=REQUEST_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.server = self._stack.enter_context(Server("--arena-nbytes", "96MiB"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._client.close()

    def victim(self, kind: str) -> psutil.Process | None:
        found = find_victims(self.server)[kind]()
        return found[0] if found else None

    def requests(self) -> list[bytes]:
        """Return requests with new pictures, which the server has to read again."""
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        urls = [data_url(draw_image(rng), "png" if n % 2 else "jpeg") for n in range(2)]
        plain = ask(urls, "Name all pictures.")
        schema = {"type": "object", "properties": {f"a{self._seed}": {"type": "integer"}}}
        formed = ask(urls[:1], "What is it?", max_tokens=24) | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": schema},
            }
        }
        return [json.dumps(each).encode() for each in (plain, formed, plain | {"stream": True})]

    def post(self, body: bytes) -> tuple[str, str]:
        """Return the outcome of a request, and its answer if there is one."""
        url = f"{self.server.url}/v1/chat/completions"
        try:
            response = self._client.post(url, content=body)
        except httpx.TimeoutException:
            return "no answer in time", ""
        except httpx.TransportError:
            self._client.close()
            self._client = plain_http.Client(timeout=REQUEST_TIMEOUT_S)
            return "connection", ""
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return self._streamed(response.text)
        if response.status_code == 200:
            return "ok", str(response.json()["choices"][0]["message"]["content"])
        code = str(response.json()["error"]["code"])
        if response.status_code == 503 and "retry-after" in response.headers:
            return code, ""
        return f"{response.status_code} {code}", ""

    def _streamed(self, text: str) -> tuple[str, str]:
        said = ""
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        for event in events:
            if event == "[DONE]":
                return "ok", said
            message = json.loads(event)
            if "error" in message:
                return str(message["error"]["code"]), ""
            said += (
                (message["choices"][0]["delta"].get("content") or "") if message["choices"] else ""
            )
        return "connection", ""

    def work(self) -> list[tuple[bytes, str, str]]:
        told = []
        for body in self.requests():
            outcome, said = self.post(body)
            self.outcomes[outcome] += 1
            told.append((body, outcome, said))
        return told

    def count(self, kind: str, calls: list[str], *, at_start: bool) -> Counter[str]:
        """Return how often a process makes each call while it is not disturbed."""
        with traced(self.subject(kind, at_start=at_start), calls) as log:
            if at_start:
                self.restart(kind)
            self.work()
            made = made_by_one(log.read_text())
        self.settle()
        return made

    def subject(self, kind: str, *, at_start: bool) -> int:
        """Return the process to trace; for a start, the parent that will start the victim."""
        if at_start and kind != "preprocess worker":
            return self.server.popen.pid
        victim = self.victim("zygote" if at_start else kind)
        assert victim is not None, kind
        return victim.pid

    def restart(self, kind: str) -> None:
        victim = self.victim(kind)
        assert victim is not None, kind
        victim.kill()
        time.sleep(TRACED_START_S)

    def settle(self) -> None:
        """Wait until the server is as before a fault: all processes run, and nothing is pinned."""
        try:
            wait_until(lambda: self.is_whole(), timeout_s=BACK_TIMEOUT_S)
            assert_nothing_is_held(self.server)
        except (AssertionError, httpx.TransportError) as error:
            raise NotAsBefore(str(error).partition("\n")[0]) from error

    def is_whole(self) -> bool:
        try:
            is_ready = self._client.get(f"{self.server.url}/ready").status_code == 200
        except httpx.TransportError:
            return False
        kinds = find_victims(self.server)
        return is_ready and all(kinds[kind]() for kind in KINDS)

    def inject(self, fault: Fault) -> None:
        """Inject a fault, note findings, and replace the server if it does not recover."""
        self.num_faults += 1
        print(f"\r{self.num_faults:5} {fault!s:<70}", end="", flush=True)
        rule = f"inject={fault.call}:error={fault.error}:when={fault.number}"
        try:
            with traced(
                self.subject(fault.kind, at_start=fault.at_start), [fault.call], rule
            ) as log:
                if fault.at_start:
                    self.restart(fault.kind)
                told = [] if fault.at_start else self.work()
                self.num_hit += "(INJECTED)" in log.read_text()
            if fault.at_start:  # each restarted process counted anew, so every start failed
                told = self.work()
            self.settle()
            for body, outcome, said in told:
                if outcome == "ok":
                    again = self.post(body)
                    if again != ("ok", said):
                        self.note(fault, f"{said!r}, and then {again}")
                elif outcome not in FAILURES | {"connection"}:
                    self.note(fault, outcome)
        except NotAsBefore as error:
            self.note(fault, str(error))
            print(self.server.log())
            self.replace()
        except Stuck:
            self.num_stuck += 1
            print("\nstrace does not let go of it: not tried", flush=True)
            self.replace()

    def replace(self) -> None:
        self.server.popen.kill()
        with suppress(Exception):  # the fault may have damaged the server in any way
            self._stack.close()
        self.__enter__()

    def note(self, fault: Fault, what: str) -> None:
        self.findings.append(f"{fault}: {what}")
        print(f"\nFOUND {self.findings[-1]}", flush=True)


KINDS = ("store", "frontend", "zygote", "preprocess worker", "core", "engine worker", "forms")


@contextmanager
def traced(pid: int, calls: list[str], rule: str | None = None) -> Iterator[Path]:
    """Trace a process and its children with strace, and yield the log of these calls."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = ["strace", "-f", "-p", str(pid), "-o", str(log), "-e", "signal=none"]
        command += ["-e", f"trace={','.join(calls)}", *(["-e", rule] if rule else [])]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert strace.stderr is not None
        line = strace.stderr.readline()
        assert "attached" in line, line
        try:
            yield log
        finally:
            strace.send_signal(signal.SIGINT)
            try:
                strace.communicate(timeout=60)
            except subprocess.TimeoutExpired as error:
                strace.kill()
                raise Stuck from error


def made_by_one(log: str) -> Counter[str]:
    """Return the highest number of each call in one process: strace counts processes separately."""
    made: Counter[str] = Counter()
    for (_, call), count in Counter(re.findall(r"^(\d* *)(\w+)\(", log, re.MULTILINE)).items():
        made[call] = max(made[call], count)
    return made


def faults_of(kind: str, made: Counter[str], calls: int, *, at_start: bool) -> Iterator[Fault]:
    """Yield a fault for the first call of each kind, the last, and some between."""
    for call, count in sorted(made.items()):
        for number in sorted({round(n) for n in np.linspace(1, count, min(count, calls))}):
            for error in ERRORS[call]:
                yield Fault(kind, call, error, number, at_start)


def main() -> int:
    """Return the exit status: 0 if nothing was found."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--only", choices=KINDS, action="append", help="a kind of process")
    options.add_argument("--call", choices=ERRORS, action="append", help="a call of the system")
    options.add_argument("--calls", type=int, default=4, metavar="N", help="of each kind fail (4)")
    given = options.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not there (of Debian: apt-get install strace)")
    # A process that can't open /proc/self/fd before it starts a program closes all possible
    # descriptors: under strace, a million calls would take minutes.
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
    start_s = time.monotonic()
    with Sweep() as sweep:
        for kind, at_start in itertools.product(given.only or KINDS, (False, True)):
            made = sweep.count(kind, given.call or list(ERRORS), at_start=at_start)
            print(f"\n== {kind}, {'start' if at_start else 'work'}: {dict(made)}", flush=True)
            for fault in faults_of(kind, made, given.calls, at_start=at_start):
                sweep.inject(fault)
    took_s = time.monotonic() - start_s
    print(
        f"\n{sweep.num_faults} faults, {sweep.num_hit} of them happened, {sweep.num_stuck} could "
        f"not be tried; {took_s:.0f} s"
    )
    print(dict(sweep.outcomes))
    print(f"{len(sweep.findings)} findings", *sweep.findings, sep="\n")
    return int(bool(sweep.findings))


if __name__ == "__main__":
    sys.exit(main())
