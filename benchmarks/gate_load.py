"""The load of `benchmarks.gate`: a process that sends requests with pages, all at once.

    python -m benchmarks.gate_load WIDTH HEIGHT

Each line of its input is a `Task` in JSON. It prints ``ready`` when the bodies are made, and waits
for an empty line. Then it sends them, and prints an `Outcome` in JSON.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from afferent.errors import ConfigError
from benchmarks.gate_servers import MODEL
from benchmarks.pages import PageFiles

_NICENESS = 10  # in production, clients have machines of their own


class Task(Struct):
    """A load; pages are numbered from ``first_page`` on, with ``num_pages`` in each request."""

    port: int
    model: str
    num_requests: int
    num_pages: int
    first_page: int


class Outcome(Struct):
    """The seconds from the first byte sent to the last answer, and the status codes."""

    elapsed_s: float
    statuses: list[int]


class Sender:
    """The parent's side of the process; it never sends a page twice."""

    def __init__(self, popen: subprocess.Popen[str], num_pages: int) -> None:
        self._popen, self._num_pages = popen, num_pages
        self._next_page = 0

    def prepare(self, port: int, num_requests: int) -> None:
        """Let the process make the bodies."""
        task = Task(port, MODEL, num_requests, self._num_pages, self._next_page)
        self._next_page += num_requests * self._num_pages
        self._say(msgspec.json.encode(task).decode())
        self._hear()

    def send(self) -> Outcome:
        self._say("")
        return msgspec.json.decode(self._hear(), type=Outcome)

    def _say(self, line: str) -> None:
        if self._popen.stdin is not None:
            self._popen.stdin.write(line + "\n")

    def _hear(self) -> str:
        line = self._popen.stdout.readline() if self._popen.stdout is not None else ""
        if not line:
            raise ConfigError("the process that sends requests has ended")
        return line


@contextlib.contextmanager
def sending(width: int, height: int, *, num_pages: int) -> Iterator[Sender]:
    """Run a process that sends pages of this size, with ``num_pages`` in each request."""
    command = [sys.executable, "-m", __name__, str(width), str(height)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as popen:
        try:
            yield Sender(popen, num_pages)
        finally:
            popen.kill()


def main() -> None:
    os.nice(_NICENESS)
    pages = PageFiles(*map(int, sys.argv[1:]))
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)
        requests = list(_requests(task, pages))
        print("ready", flush=True)
        sys.stdin.buffer.readline()
        outcome = asyncio.run(_send_all(task.port, requests))
        print(msgspec.json.encode(outcome).decode(), flush=True)


def _requests(task: Task, pages: PageFiles) -> Iterator[bytes]:
    number = task.first_page
    for _ in range(task.num_requests):
        parts: list[dict[str, object]] = []
        for _ in range(task.num_pages):
            url = "data:image/png;base64," + base64.b64encode(pages.page(number)).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
            number += 1
        parts.append({"type": "text", "text": "What do these pages say?"})
        message = {"role": "user", "content": parts}
        body = msgspec.json.encode({"model": task.model, "messages": [message], "max_tokens": 1})
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        yield head.encode() + body


async def _send_all(port: int, requests: list[bytes]) -> Outcome:
    start = time.perf_counter()
    statuses = await asyncio.gather(*(_send(port, request) for request in requests))
    return Outcome(time.perf_counter() - start, statuses)


async def _send(port: int, request: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        status = await reader.readline()
        await reader.read()
    finally:
        writer.close()
    return int(status.split()[1])


if __name__ == "__main__":
    main()
