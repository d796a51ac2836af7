"""Each test of this package ends the connections that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afferent.batch.shared_item import connections


@pytest.fixture(autouse=True)
def no_connections() -> Iterator[None]:
    """End the connections of shared items: their threads would run in a simulated machine, too."""
    yield
    connections.close()
