"""A client and a daemon of different versions: both report both versions, and the next step."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from afferent.errors import FormatError, StoreUnavailable, VersionMismatch
from afferent.runtime import wire
from afferent.runtime.sockets import new_address
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.hello import VERSION, Hello, Welcome, read_hello, read_welcome
from afferent.store.segment import create_segment
from afferent.types import ObjectKind, encode
from tests.server import wait_until

NEWER = 99
FROM_THE_FUTURE = [
    ["hello", NEWER, True, "same fields", 1],
    ["hello", NEWER, {"name": "a map of all that a client wants"}],
    ["hello", NEWER],
]


@pytest.mark.parametrize("hello", FROM_THE_FUTURE)
def test_daemon_answers_a_newer_client_with_its_version(
    hello: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    with StoreServer(1 << 20, shares={ObjectKind.RAW: 1.0}) as server:
        assert _answer(server.address, encode(hello)) == (VERSION, 0)
        DaemonStore(server.address, name="of this version").close()
    logged = capfd.readouterr().err
    assert f"a client speaks version {NEWER} of the protocol" in logged
    assert f"the store daemon version {VERSION}: upgrade Afferent where the store daemon" in logged


@pytest.mark.parametrize("message", [b"\xc1", encode(["greetings", 3]), encode({"version": 3})])
def test_daemon_answers_an_unknown_protocol_with_its_version(message: bytes) -> None:
    with StoreServer(1 << 20, shares={ObjectKind.RAW: 1.0}) as server:
        assert _answer(server.address, message) == (VERSION, 0)


def test_hello_that_breaks_this_version_is_a_format_error() -> None:
    with pytest.raises(FormatError):
        read_hello(encode(["hello", VERSION, "yes", "name", 1]))
    with pytest.raises(FormatError):
        read_welcome(encode([VERSION, "?"]))
    assert read_hello(encode(Hello(VERSION, True, "name", 1))) == Hello(VERSION, True, "name", 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            [NEWER, {"segment": 1}],
            f"the store daemon speaks version {NEWER} of the protocol, this client version "
            f"{VERSION}: upgrade Afferent where this client runs, and restart this client",
        ),
        (
            [1, 1, 0],
            f"the store daemon speaks version 1 of the protocol, this client version {VERSION}: "
            "upgrade Afferent where the store daemon runs, and restart the store daemon",
        ),
    ],
)
def test_client_names_both_versions_and_the_next_step(answer: list[object], words: str) -> None:
    with daemon([encode(answer)] * 2) as address:
        with pytest.raises(VersionMismatch) as raised:
            DaemonStore(address, name="client", timeout_s=20)
        assert raised.value.message == words
        with pytest.raises(VersionMismatch) as raised:
            asyncio.run(AsyncDaemonStore.connect(address, name="client", timeout_s=20))
        assert raised.value.message == words


WELCOME = encode(Welcome(VERSION, 1, 1))


def test_calls_after_a_daemon_of_another_version_took_over_name_both() -> None:
    with daemon([WELCOME, *[encode([NEWER, 1, 0])] * 1000]) as address:
        store = DaemonStore(address, name="client", timeout_s=20)

        def message() -> str:
            with pytest.raises(StoreUnavailable) as raised:
                store.stat()
            return raised.value.message

        wait_until(lambda: f"version {NEWER}" in message())
        assert f"version {VERSION}" in message()
        with pytest.raises(VersionMismatch):
            store.stat()
        store.close()
        with pytest.raises(StoreUnavailable, match="this connection is closed"):
            store.stat()


def test_calls_of_an_event_loop_name_both_versions() -> None:
    async def run(address: str) -> None:
        store = await AsyncDaemonStore.connect(address, name="client", timeout_s=20)
        raised: list[StoreUnavailable] = []

        async def is_refused() -> bool:
            try:
                await store.stat()
            except StoreUnavailable as error:
                raised.append(error)
            return isinstance(raised[-1], VersionMismatch)

        while not await is_refused():
            await asyncio.sleep(0.01)
        assert f"version {NEWER} of the protocol" in raised[-1].message
        await store.close()

    with daemon([WELCOME, *[encode([NEWER, 1, 0])] * 1000]) as address:
        asyncio.run(asyncio.wait_for(run(address), 30))


@contextmanager
def daemon(answers: Sequence[bytes]) -> Iterator[str]:
    """A daemon that answers each connection with the next of these, and closes it; its address."""
    address, memory = new_address("other"), create_segment(4096)
    with wire.listen(address) as listener:

        def serve() -> None:
            for answer in answers:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.recv(4096)
                    socket.send_fds(sock, [wire.pack_frame(answer)], [memory])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield address
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            os.close(memory)


def _answer(address: str, message: bytes) -> tuple[int, int]:
    """Return the version and the client's number in the daemon's answer to a first message."""
    with wire.connect(address, timeout_s=20) as sock:
        sock.sendall(wire.pack_frame(message))
        data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
        assert not fds, "the arena is not given away"
        assert sock.recv(1) == b""
    (frame,) = wire.FrameCutter().feed(data)
    welcome = read_welcome(frame)
    return welcome.version, welcome.client
