"""Other users of the machine can reach a server by HTTP only."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.others import another_user, needs_root
from tests.server import TINY, TINY_ENGINE, Server, wait_until

NUM_FLOODERS = 2
CORE, DAEMON = "afferent.builtin.engine.core.main", "afferent.store.daemon.main"


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server(*TINY_ENGINE) as server:
        yield server


@needs_root
def test_who_floods_the_sockets_keeps_nobody_out(own_server: Server, server: Server) -> None:
    addresses = [own_server.address_of(module) for module in (TINY, DAEMON)]
    addresses.append(server.address_of(CORE))  # the built-in engine of another server
    # The addresses of earlier versions, which any user could connect to.
    addresses += ["\0" + address for address in addresses]
    folder = Path(addresses[0]).parent

    def flood(pipe: Connection) -> None:
        num_connected = num_tried = 0
        while not pipe.poll():
            for address in addresses:
                with socket.socket(socket.AF_UNIX) as sock:
                    num_connected += not sock.connect_ex(address)
                    num_tried += 1
        with contextlib.suppress(PermissionError):
            num_connected += len(list(folder.iterdir()))
        pipe.send((num_connected, num_tried))

    num_lines = len(own_server.lines)
    (victim,) = own_server.find("afferent.builtin.frontend")
    with another_user(flood) as one, another_user(flood) as other:
        start_s = time.monotonic()
        victim.kill()
        victim.wait(60)
        wait_until(lambda: own_server.get("/ready").status_code == 200)
        took_s = time.monotonic() - start_s
        for flooder in (one, other):
            flooder.send("enough")
            num_connected, num_tried = flooder.recv()
            print(f"{num_tried:,} tries; back after {took_s:.2f} s")
            assert num_connected == 0
            assert num_tried > 100
    assert len(own_server.lines) - num_lines < 5, "what they do is in no log"


def test_nothing_is_left_of_the_sockets() -> None:
    with Server(*TINY_ENGINE) as server:
        path = Path(server.address_of(DAEMON))
        assert path.parent == Path(server.address_of(TINY)).parent
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()
