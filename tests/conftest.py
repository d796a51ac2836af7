"""Fixtures for all tests: above all, a server that is started as an operator starts it."""

from __future__ import annotations

import gc
import os
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest

from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.registry import REGISTRY
from tests import examples
from tests.server import Server
from tests.turns import order, turn

NUM_LINES = 100


_OPTIONAL = (
    ("storm", "takes minutes"),
    ("bench", "runs a whole benchmark (make test-bench)"),
    ("package", "builds the package"),
    ("clients", "needs clients of others (make test-clients)"),
    ("vllm", "needs a real vLLM (make test-vllm)"),
    ("ray", "needs Ray (make test-ray)"),
    ("page", "needs a browser (make test-page)"),
    ("engines", "needs other engines (make test-engines)"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench", action="store_true", help="the long ones of the benchmarks")
    parser.addoption("--package", action="store_true", help="build and install the package")
    parser.addoption("--storm", action="store_true", help="the long form of all storms")
    parser.addoption("--clients", action="store_true", help="also with clients of others")
    parser.addoption("--page", action="store_true", help="the live page in a real browser")
    parser.addoption("--ray", action="store_true", help="in clusters of Ray")
    parser.addoption("--vllm", action="store_true", help="beside a real vLLM")
    parser.addoption("--engines", action="store_true", help="in front of other real engines")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # the first test comes first
    examples.choose(is_long=config.getoption("--storm"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: many tests wait for timeouts or for servers, and some run alone."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt modules and tests from garbage collections, which would visit a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tutorial first, because its commands expect no other store on the machine."""
    items.sort(key=order)
    for marker, why in _OPTIONAL:
        if not config.getoption(f"--{marker}"):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(f"{why}: --{marker}"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Wait for the test's turn, before its timeout begins."""
    with turn(item, nextitem):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last lines of the logs of the test's servers to the report of a failure."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Server):
                report.sections.append((f"log of {name}", "\n".join(value.lines[-NUM_LINES:])))
    return report


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    """Let each test begin with metrics at 0 and with no recent requests."""
    REGISTRY.reset()
    JOURNAL.reset()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The built-in model, served by real processes, for the whole session."""
    with Server() as running:
        yield running


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A random generator that is the same in each run of the same test."""
    seed = zlib.crc32(request.node.nodeid.encode())
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Yield a folder in memory, where a sync takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
