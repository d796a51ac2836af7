"""A running `afferent serve` for tests, and what can be seen of its processes."""

from __future__ import annotations

import base64
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2 as httpx
import openai
import psutil

from afferent.store.client import DaemonStore
from afferent.testing.pictures import Picture

START_TIMEOUT_S = 90.0


class Server:
    """``afferent serve`` in a process of its own, on a port that the system chose."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.lines: list[str] = []
        self._url = ""
        self._announced = threading.Event()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "afferent.cli", "serve", "--port", "0"]
        command += ["--preprocess-workers", "2", "--arena-nbytes", "256MiB", *self._arguments]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._announced.wait(START_TIMEOUT_S) or not self._url:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError("the server did not start:\n" + self.log())
        # Every process has said that it is ready; the frontend hears of the engine a little later.
        wait_until(lambda: self.get("/ready").status_code == 200)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(60)
            finally:
                self.popen.kill()
        self._reader.join(10)
        if kind is not None:
            print(self.log())

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr:
            for line in self.popen.stderr:
                self.lines.append(line.rstrip("\n"))
                if match := re.search(r'Serving "\S+" on (\S+)/v1', line):
                    self._url = match[1]
                    self._announced.set()
        self._announced.set()

    @property
    def url(self) -> str:
        return self._url

    def log(self) -> str:
        return "\n".join(self.lines)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, body: Any) -> httpx.Response:
        """POST to the chat endpoint; ``bytes`` go as they are, anything else as JSON."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(f"{self.url}/v1/chat/completions", timeout=60, **content)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def metrics(self) -> dict[str, float]:
        """Each sample of ``/metrics`` by its name and labels as written."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def store_figure(self, name: str) -> float:
        return self.metrics()[f'afferent_store{{figure="{name}"}}']

    def processes(self) -> list[psutil.Process]:
        """The supervisor's children and their children."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    def find(self, module: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    found.append(process)
        return found

    def preprocess_workers(self) -> list[psutil.Process]:
        """The zygote's children."""
        pool = self.find("afferent.preprocess.pool")
        return [process for process in pool if process.parent() in pool]

    def store(self) -> DaemonStore:
        """A connection of the test's own to the server's store."""
        return DaemonStore(self.address_of("afferent.store.daemon"), name="test")

    def address_of(self, module: str) -> str:
        """Where one of the server's processes listens for the others."""
        (process,) = self.find(module)
        fds = Path(f"/proc/{process.pid}/fd").iterdir()
        inodes = {match[1] for fd in fds if (match := re.match(r"socket:\[(\d+)\]", _target(fd)))}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[6] in inodes and len(fields) == 8 and fields[5] == "01":
                return "\0" + fields[7][1:]
        raise AssertionError(f"{module} does not listen")

    def suspend_preprocess_workers(self) -> list[psutil.Process]:
        """Stop both workers while each of them waits for a job."""
        wait_until(lambda: self.store_figure("num_workers") == 2)
        workers = self.preprocess_workers()
        assert len(workers) == 2
        for worker in workers:
            worker.suspend()
        return workers


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Poll until ``condition`` holds; fail when it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def data_url(picture: Picture | bytes, kind: str = "jpeg") -> str:
    data = (
        picture
        if isinstance(picture, bytes)
        else picture.encode("JPEG" if kind == "jpeg" else "PNG")
    )
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(urls: list[str], question: str, **parameters: Any) -> dict[str, Any]:
    """A request about pictures, as JSON."""
    content = [*map(image_part, urls), {"type": "text", "text": question}]
    return {"model": "shapes", "messages": [{"role": "user", "content": content}], **parameters}
