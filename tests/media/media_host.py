"""A media host on loopback with scripted answers, right or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def media_host(answers: dict[str, Answer]) -> Iterator[str]:
    """Run the host; yield its ``HOST:PORT``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answers[self.path](self)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Host(ThreadingHTTPServer):
        request_queue_size = 256  # with the default of 5, a client waits seconds for a second SYN

    host = Host(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{host.server_address[1]}"
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


def send(body: bytes, status: int = 200, **headers: str) -> Answer:
    """Answer with this body and these headers; ``_`` in their names stands for ``-``."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def send_raw(text: bytes) -> Answer:
    """Send these bytes instead of an HTTP answer."""
    return lambda request: request.wfile.write(text) and None


def send_slowly(
    piece: bytes, *, num: int, pause_s: float, length: int | None = None, wait: threading.Event
) -> Answer:
    """Send the piece ``num`` times, with pauses that end early when ``wait`` is set."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        if length is not None:
            request.send_header("Content-Length", str(length))
        request.end_headers()
        for _ in range(num):
            request.wfile.write(piece)
            wait.wait(pause_s)

    return answer
