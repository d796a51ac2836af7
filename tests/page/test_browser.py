"""The live page in a real browser: it shows the server's activity, without errors.

``make test-page`` runs it, and takes the pictures of the documentation.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import COLOURS, SHAPES, draw_image
from tests.end_to_end.test_page import MODULE, page_of
from tests.page.browser import Tab, launched, tab
from tests.server import Server, ask, data_url, wait_until

pytestmark = [pytest.mark.page, pytest.mark.timeout(300)]

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
KEY = "page-key-0123456789"
QUESTION = "What is in the picture?"
HOSTILE_NAME = "<b>circle</b><img src=x onerror=alert(1)>.jpg"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    arguments = ["--ui", "0", "--frontends", "2", "--embeddings-share", "0.2"]
    with Server(*arguments, "--arena-nbytes", "128MiB") as running:
        yield running


_NEW = itertools.count(100)
"""Numbers for new pictures."""


class Load:
    """Clients that ask about pictures, some new and some known."""

    def __init__(self, server: Server) -> None:
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(3)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._stop.wait(0.3):
            numbers = rng.integers(12, size=int(rng.integers(1, 4)))
            seeds = [next(_NEW) if number < 4 else int(number) for number in numbers]
            self._server.post(ask([data_url(picture(seed)) for seed in seeds], QUESTION))


def picture(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    colour, shape = COLOURS[seed % len(COLOURS)], SHAPES[seed % len(SHAPES)]
    return draw_image(rng, colour=colour, shape=shape).encode("JPEG")


@pytest.fixture
def red_circle(tmp_path: Path) -> Path:
    path = tmp_path / "circle.jpg"
    drawn = draw_image(np.random.default_rng(5), colour="red", shape="circle")
    path.write_bytes(drawn.encode("JPEG"))
    return path


def choose_and_ask(shown: Tab, path: Path) -> None:
    page = shown.page
    page.get_by_label("Drop an image here").set_input_files(path)
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer", has_text="a red circle").wait_for()
    page.get_by_role("button", name="Ask").wait_for()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("page", 1280, "light"), ("page-dark", 1280, "dark"), ("page-narrow", 400, "light")],
)
def test_pictures(
    browser: Any, server: Server, red_circle: Path, name: str, width: int, scheme: str
) -> None:
    """Take the pictures of the documentation, from a busy server."""
    with (
        Load(server),
        tab(browser, page_of(server), width=width, height=1100, scheme=scheme) as shown,
    ):
        page = shown.page
        shown.wait_live()
        page.wait_for_timeout(12_000)  # wait for lines with a few seconds of data
        choose_and_ask(shown, red_circle)
        page.locator("#ended .mine").wait_for()
        page.locator("#ended li details summary", has_text="made").first.click()
        page.locator("#ended details[open] tbody tr").nth(5).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate("scrollTo(0, 0)")
        take(page, PICTURES / f"{name}.png")


def take(page: Any, path: Path) -> None:
    """Write a screenshot with 256 colours, which halves the file."""
    with Image.open(io.BytesIO(page.screenshot())) as shot:
        colours = shot.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        colours.save(path, optimize=True)


def test_keys_and_names_suffice(browser: Any, server: Server) -> None:
    """The elements have names for screen readers, work with the keyboard, and keep the focus."""
    server.post(ask([data_url(picture(1))], QUESTION))
    with tab(browser, page_of(server)) as shown:
        page = shown.page
        shown.wait_live()
        for name in ("Requests", "Ask", "Arena", "Gate", "Largest items", "Processes"):
            assert page.get_by_role("heading", name=name, exact=False).count() >= 1
        assert page.get_by_role("list", name="Lately ended").count() == 1
        page.locator("#ended summary").first.wait_for()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.tagName") == "SUMMARY":
                break
        page.keyboard.press("Enter")
        table = page.locator("#ended details[open] table")
        table.wait_for()
        assert table.get_by_role("columnheader", name="Stage").count() == 1
        page.wait_for_timeout(2500)
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert table.is_visible()


def test_a_dropped_image_is_asked_about(browser: Any, server: Server, red_circle: Path) -> None:
    with tab(browser, page_of(server)) as shown:
        page = shown.page
        shown.wait_live()
        data = page.evaluate_handle(
            """([name, bytes]) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], name, {type: "image/jpeg"}));
                return data;
            }""",
            [HOSTILE_NAME, list(red_circle.read_bytes())],
        )
        page.dispatch_event("#drop", "drop", {"dataTransfer": data})
        page.locator("#preview").wait_for()
        assert page.locator("#drop-note").inner_text() == HOSTILE_NAME, "as text, not as HTML"
        assert page.locator("#drop-note b").count() == 0
        page.get_by_role("button", name="Ask").click()
        page.locator("#answer", has_text="a red circle").wait_for()


def test_a_page_that_nobody_sees_asks_nobody(browser: Any, server: Server) -> None:
    with tab(browser, page_of(server)) as shown, server.store() as store:

        def is_looked_at() -> bool:
            return "page" in {client.name for client in store.list_clients()}

        shown.wait_live()
        assert is_looked_at()
        for hidden, wanted in ((True, False), (False, True)):
            shown.page.evaluate(
                """(hidden) => {
                    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
                    document.dispatchEvent(new Event("visibilitychange"));
                }""",
                hidden,
            )
            wait_until(lambda: is_looked_at() is wanted)  # noqa: B023


def test_a_page_that_is_lost_comes_back(browser: Any, server: Server) -> None:
    with tab(browser, page_of(server)) as shown:
        shown.wait_live()
        for process in server.find(MODULE):
            process.kill()
        shown.page.locator("#state.lost").wait_for()
        shown.wait_live()
        assert all("ERR_" in each or "network" in each.lower() for each in shown.complaints)
        shown.complaints.clear()


def test_a_key_is_asked_for(browser: Any, red_circle: Path) -> None:
    with (
        Server("--ui", "0", "--arena-nbytes", "64MiB", "--ui-key", KEY) as server,
        tab(browser, page_of(server)) as shown,
    ):
        page = shown.page
        field = page.get_by_label("Key of this page")
        field.wait_for()
        assert page.locator("#way li").count() == 0
        field.fill("wrong" * 4)
        page.get_by_role("button", name="Enter").click()
        page.locator("#entry-note", has_text="not the page's").wait_for()
        assert len(shown.complaints) == 1
        assert "401" in shown.complaints.pop()
        field.fill(KEY)
        field.press("Enter")
        shown.wait_live()
        choose_and_ask(shown, red_circle)
        page.reload()
        shown.wait_live()
