"""Web servers of tests: none leaves an open connection, which would fail a later test."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from tests.end_to_end.web_thread import Listening, listening, served


async def _answer(request: web.Request) -> web.StreamResponse:
    return web.Response()


@pytest.mark.parametrize("num_rounds", range(6))
def test_a_connection_that_comes_just_before_the_end_is_closed(
    tmp_path: Path, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops some rounds of its loop after a client has connected."""
    path = str(tmp_path / "web.sock")

    bound = socket.socket(socket.AF_UNIX)
    bound.bind(path)

    async def start() -> Sequence[Listening]:
        return [await listening(_answer, bound)]

    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        with served(start) as loop:
            soon = loop.call_soon_threadsafe

            def after(num_left: int, stop: Callable[[], None]) -> None:
                if num_left:
                    loop.call_soon(after, num_left - 1, stop)
                else:
                    stop()

            def connect(stop: Callable[[], None]) -> None:
                client.connect(path)
                after(num_rounds, stop)

            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda stop: soon(connect, stop))
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            assert num_rounds == 0, "it was not accepted"
