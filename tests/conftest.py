"""What all tests share: a server that is started the way an operator starts it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.server import Server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storm", action="store_true", help="the long form of all storms")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tutorial first: its commands expect no other store on the machine."""
    items.sort(key=lambda item: item.path.name != "test_tutorial.py")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The built-in model, served by real processes, for the whole run."""
    with Server() as running:
        yield running


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Randomness that is the same in each run of the same test."""
    seed = zlib.crc32(request.node.nodeid.encode())
    print(f"seed {seed}")
    return np.random.default_rng(seed)
