"""Another client of a store, which fills it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from afferent.store.client.daemon_store import DaemonStore
from afferent.types import CreateItem, ObjectKind
from tests.server import wait_until

_TIMEOUT_S = 10.0


@contextlib.contextmanager
def filled_by_another(address: str | None) -> Iterator[DaemonStore]:
    """Fill the space for features as another client, which is yielded, until ``release("fill")``.

    Views that were collected before are no obstacle.
    """
    assert address is not None
    kind = ObjectKind.FEATURES
    with DaemonStore(address, name="another", writable=True) as store:
        wait_until(lambda: store.stat().kinds[kind].held_nbytes == 0, timeout_s=_TIMEOUT_S)
        store.evict(kind)
        store.create("fill", [CreateItem(kind, store.stat().kinds[kind].capacity_nbytes)])
        yield store


@contextlib.contextmanager
def filled_until_awaited(address: str | None) -> Iterator[None]:
    """Fill the space for features as another client, until a reservation waits for some of it."""
    with filled_by_another(address) as store, ThreadPoolExecutor(1) as thread:

        def release_when_awaited() -> None:
            try:
                wait_until(lambda: store.stat().num_reservations_queued > 0, timeout_s=_TIMEOUT_S)
            finally:
                store.release("fill")

        released = thread.submit(release_when_awaited)
        yield
        released.result()
