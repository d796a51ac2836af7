"""Another process that fills a store."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
from tests.server import wait_until

_TIMEOUT_S = 10.0
_PROGRAM = """
import sys
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import CreateItem, ObjectKind
kind = ObjectKind.FEATURES
with DaemonStore(sys.argv[1], name="another", writable=True) as store:
    store.evict(kind)
    store.create("fill", [CreateItem(kind, store.stat().kinds[kind].capacity_nbytes)])
    print("full", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def filled_by_another(address: str | None) -> Iterator[Callable[[], None]]:
    """Fill the space for features in another process; yield a function that releases the space.

    Views that were collected before are no obstacle.
    """
    assert address is not None
    with DaemonStore(address, name="looker") as store:
        wait_until(lambda: store.stat().kinds[ObjectKind.FEATURES].held_nbytes == 0)
    command = [sys.executable, "-c", _PROGRAM, address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"full\n"

        def release() -> None:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(_TIMEOUT_S) == 0

        try:
            yield release
        finally:
            if process.poll() is None:
                release()


@contextlib.contextmanager
def filled_until_awaited(address: str | None, *, num_awaited: int = 1) -> Iterator[None]:
    """Fill the space for features, until so many reservations wait for some of it."""
    assert address is not None
    with (
        filled_by_another(address) as release,
        DaemonStore(address, name="looker") as store,
        ThreadPoolExecutor(1) as thread,
    ):

        def release_when_awaited() -> None:
            try:
                wait_until(
                    lambda: store.stat().num_reservations_queued >= num_awaited,
                    timeout_s=_TIMEOUT_S,
                )
            finally:
                release()

        released = thread.submit(release_when_awaited)
        yield
        released.result()
