"""Fixtures for the tests of the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.stores import CAPACITY, SHARES, SharedDaemon


@pytest.fixture(scope="package")
def daemon() -> Iterator[SharedDaemon]:
    with SharedDaemon(CAPACITY, SHARES) as shared:
        yield shared
