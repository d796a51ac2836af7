"""Fixtures for the tests of a frontend in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afferent.store.client.daemon_store import DaemonStore
from tests.builtin.frontends import ARENA_NBYTES, SHARES, preprocess_worker
from tests.store.stores import SharedDaemon


@pytest.fixture(scope="package")
def daemon() -> Iterator[SharedDaemon]:
    with SharedDaemon(ARENA_NBYTES, SHARES) as shared:
        yield shared


@pytest.fixture
def store_address(daemon: SharedDaemon) -> Iterator[str]:
    """Yield the address of a store without a worker."""
    with DaemonStore(daemon.address, name="lender") as lender, daemon.lent(lender):
        yield daemon.address


@pytest.fixture
def address(store_address: str) -> Iterator[str]:
    """Yield the address of a store with a worker."""
    with preprocess_worker(store_address):
        yield store_address
