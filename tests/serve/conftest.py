"""What the tests of a frontend in this process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afferent.store.server import StoreServer
from tests.serve.frontends import ARENA_NBYTES, SHARES, preprocess_worker


@pytest.fixture
def address() -> Iterator[str]:
    """Of a store with a worker."""
    with (
        StoreServer(ARENA_NBYTES, shares=SHARES) as server,
        preprocess_worker(server.address),
    ):
        yield server.address
