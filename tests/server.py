"""A running `afferent serve` for tests, and views of its processes."""

from __future__ import annotations

import base64
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2 as httpx
import openai
import psutil

from afferent.conformance.images import DrawnImage
from afferent.store.client.daemon_store import DaemonStore
from tests import plain_http

WORKER = "afferent.builtin.engine.worker.main"
TINY = "examples.tiny_plugin"
TINY_ENGINE = ("--engine", f"{TINY}:Tiny")
"""Arguments of a server that needs an engine, but not the built-in one, which takes 6 s of
processor time to start: this one says the mean colour of each image, and takes no sampling."""
START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
_LEAST_POLL_S, _MOST_POLL_S = 0.01, 0.1


class Server:
    """``afferent serve`` in a process of its own, on a port chosen by the system."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        command: str = "serve",
    ) -> None:
        """Create a server.

        Args:
            env: Added to its environment.
            command: ``serve``, or ``render`` for a server without a model.
        """
        self._command = command
        self._arguments, self._env = arguments, {**os.environ, **(env or {})}
        self._start_timeout_s = start_timeout_s
        self.lines: list[str] = []
        self._url = ""
        self._announced = threading.Event()
        self._client: openai.OpenAI | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "afferent.cli", self._command, "--port", "0"]
        command += ["--frontends", "1", "--preprocess-workers", "2", "--arena-nbytes", "256MiB"]
        command += self._arguments
        self.popen = subprocess.Popen(
            command, env=self._env, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._announced.wait(self._start_timeout_s)
            assert self._url, "the server did not start:\n" + self.log()
            # Every process has reported that it is ready; the frontend is notified of the engine
            # later.
            wait_until(lambda: self.get("/ready").status_code == 200)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._client.close()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(STOP_TIMEOUT_S)
            finally:
                self._kill()
        self._reader.join(STOP_TIMEOUT_S)
        if kind is not None:
            print(self.log())

    def _kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr:
            for line in self.popen.stderr:
                self.lines.append(line.rstrip("\n"))
                if match := re.search(r'Serving \\?"\S+?" on (\S+?)/v1', line):
                    self._url = match[1]
                    self._announced.set()
        self._announced.set()

    @property
    def url(self) -> str:
        return self._url

    def log(self) -> str:
        return "\n".join(self.lines)

    def client(self) -> openai.OpenAI:
        """Return the same client each time; it is closed with the server."""
        if self._client is None:
            http = openai.DefaultHttpxClient(verify=plain_http.NO_CERTIFICATES)
            self._client = openai.OpenAI(**self._connection(), http_client=http)
        return self._client

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._connection())

    def _connection(self) -> dict[str, Any]:
        """Return the arguments for OpenAI's clients."""
        url = f"{self.url}/v1"
        return {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 60}

    def post(self, body: Any) -> httpx.Response:
        """POST to the chat endpoint: ``bytes`` unchanged, anything else as JSON."""
        return self.post_to("/v1/chat/completions", body)

    def post_to(self, path: str, body: Any) -> httpx.Response:
        """POST to a path: ``bytes`` unchanged, anything else as JSON."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return plain_http.post(f"{self.url}{path}", timeout=150, **content)

    def get(self, path: str) -> httpx.Response:
        return plain_http.get(f"{self.url}{path}", timeout=60)

    def metrics(self) -> dict[str, float]:
        """Return each sample of ``/metrics`` by its name and labels as written.

        On a busy machine the store may not answer in time, and ``/metrics`` has no sums then.
        """
        answers: list[httpx.Response] = []

        def has_sums() -> bool:
            answers.append(self.get("/metrics"))
            return answers[-1].status_code != 503

        wait_until(has_sums)
        samples = {}
        for line in answers[-1].text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def metric(self, name: str) -> float | None:
        """Return the sum of a metric's series, or ``None`` without any.

        An engine that does not answer has no series.
        """
        found = [v for key, v in self.metrics().items() if key.partition("{")[0] == name]
        return sum(found) if found else None

    def refuses(self) -> bool:
        """Return whether no process listens any more; pending connections are cut off."""
        try:
            self.get("/health")
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return True
        return False

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor's children and their children."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    def find(self, module: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    found.append(process)
        return found

    def preprocess_workers(self) -> list[psutil.Process]:
        """Return the zygote's children."""
        return self._forks("afferent.media.workers.pool")

    def engine_workers(self) -> list[psutil.Process]:
        """Return the engine workers, each of which is the child of a zygote of its own."""
        return self._forks(WORKER)

    def _forks(self, module: str) -> list[psutil.Process]:
        """Return the processes of this module that another of its processes has forked."""
        all_of_it = self.find(module)
        forks = []
        for process in all_of_it:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.parent() in all_of_it:
                    forks.append(process)
        return forks

    def store(self) -> DaemonStore:
        """Connect the test to the server's store."""
        return DaemonStore(self.address_of("afferent.store.daemon.main"), name="test")

    def address_of(self, module: str) -> str:
        """Return the address at which one of the server's processes listens for the others."""
        (process,) = self.find(module)
        fds = Path(f"/proc/{process.pid}/fd").iterdir()
        inodes = {match[1] for fd in fds if (match := re.match(r"socket:\[(\d+)\]", _target(fd)))}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[6] in inodes and len(fields) == 8 and fields[5] == "01":
                return fields[7]
        raise AssertionError(f"{module} does not listen")

    def idle_preprocess_workers(self) -> list[psutil.Process]:
        """Wait until both workers are waiting for a job, and return them."""
        wait_until(lambda: self.metric("afferent_store_workers") == 2)
        wait_until(lambda: self.metric("afferent_store_jobs_running") == 0)
        workers = self.preprocess_workers()
        assert len(workers) == 2
        # Their last jobs have ended, but they may not have requested the next one yet.
        for worker in workers:
            wait_until(lambda: worker.status() == psutil.STATUS_SLEEPING)  # noqa: B023
        return workers


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[list[psutil.Process]]:
    """Stop the processes, and resume those that still exist at the end."""
    for process in processes:
        process.suspend()
    try:
        yield processes
    finally:
        resume(processes)


def resume(processes: list[psutil.Process]) -> None:
    """Resume the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Poll until ``condition`` is true, or fail with its source code after the timeout.

    The longer it has waited, the longer are the pauses: polls take processor time of servers.
    """
    start_s = time.monotonic()
    is_late = False
    while not condition():
        assert not is_late, f"not within {timeout_s:g} s: {_source(condition)}"
        waited_s = time.monotonic() - start_s
        is_late = waited_s > timeout_s  # one more check after a pause
        time.sleep(min(max(_LEAST_POLL_S, waited_s / 20), _MOST_POLL_S))


def _source(condition: Callable[[], bool]) -> str:
    """Return the source code of the condition; for a lambda, of its whole statement."""
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)


def data_url(picture: DrawnImage | bytes, kind: str = "jpeg") -> str:
    data = (
        picture
        if isinstance(picture, bytes)
        else picture.encode("JPEG" if kind == "jpeg" else "PNG")
    )
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(urls: list[str], question: str, **parameters: Any) -> dict[str, Any]:
    """Return a request about pictures, for the body's JSON."""
    content = [*map(image_part, urls), {"type": "text", "text": question}]
    return {"model": "shapes", "messages": [{"role": "user", "content": content}], **parameters}
