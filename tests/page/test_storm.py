"""The live page while the server gets many times the load that it can serve."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import tempfile
import threading
from typing import Any

import pytest

from tests.end_to_end.test_overload import LONG, Burst, Watch, arguments, p99, send_burst
from tests.end_to_end.test_page import SAME_ORIGIN, page_of
from tests.page.browser import launched, tab
from tests.server import Server

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]

MEDIUM = Burst(100, num_pictures=8, arena_mib=32, min_served=6, most_ms=2000.0, slack=1.0)
_RECORD_TIMES = """() => {
    window.times = [];
    new MutationObserver(() => window.times.push(performance.now())).observe(
        document.querySelector("#way path.line"), {attributes: true});
}"""


@pytest.fixture
def burst(request: pytest.FixtureRequest) -> Burst:
    return LONG if request.config.getoption("--storm") else MEDIUM


def test_it_goes_on_once_a_second(burst: Burst) -> None:
    with (
        launched() as browser,
        Server("--ui", "0", *arguments(burst)) as server,
        tab(browser, page_of(server)) as shown,
    ):
        shown.wait_live()
        shown.page.evaluate(_RECORD_TIMES)
        storm = threading.Thread(target=send_burst, args=(server, burst))
        storm.start()
        waiting = 0
        while storm.is_alive():
            shown.page.wait_for_timeout(500)
            waiting = max(waiting, shown.page.locator("#way li.waiting").count())
        storm.join()
        times: list[float] = shown.page.evaluate("window.times")
        gaps = [(later - earlier) / 1e3 for earlier, later in itertools.pairwise(times)]
        print(f"{len(gaps)} updates, p50 {statistics.median(gaps):.2f} s, most {max(gaps):.2f} s")
        assert len(gaps) >= 5
        assert statistics.median(gaps) < 1.5
        assert max(gaps) < 5.0
        assert waiting, "the page has shown that something queues"


def test_frontends_are_unharmed(burst: Burst) -> None:
    """Compare the answer times with an open page and without one, on one server."""
    with Server("--ui", "0", *arguments(burst)) as server:
        took = {}
        for is_looked_at in (False, True, True, False) * 2:
            with Looking(page_of(server), is_looked_at):
                found = watched(server, burst)
            took.setdefault(is_looked_at, []).extend(found)
    for is_looked_at, found in took.items():
        who = "with the page" if is_looked_at else "without"
        print(f"{who}: /health p50 {statistics.median(found):.1f} ms, p99 {p99(found):.1f} ms")
    assert p99(took[True]) <= 1.5 * p99(took[False]) + 20.0


def watched(server: Server, burst: Burst) -> list[float]:
    """Return the times of `/health` during a burst, in milliseconds."""
    watch = Watch(server)
    watcher = threading.Thread(target=watch.run)
    watcher.start()
    try:
        send_burst(server, burst)
    finally:
        watch.stop.set()
        watcher.join()
    return watch.health_ms


class Looking:
    """A viewer of the page that needs almost no processor time."""

    def __init__(self, page: str, does: bool) -> None:
        headers = [f"-H{name}: {value}" for name, value in SAME_ORIGIN.items()]
        self._command = ["curl", "-sSN", *headers, f"{page}/views"] if does else []

    def __enter__(self) -> None:
        self._seen = tempfile.TemporaryFile()
        if self._command:
            self._curl = subprocess.Popen(self._command, stdout=self._seen)

    def __exit__(self, *error: Any) -> None:
        with self._seen:
            if self._command:
                self._curl.terminate()
                self._curl.wait()
                self._seen.seek(0)
                assert self._seen.read().count(b"data: ") >= 3
