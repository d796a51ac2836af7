"""The live page in a real browser: it shows the server's activity, without errors.

``make test-page`` runs it, and takes the pictures of the documentation.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import COLOURS, SHAPES, draw_image
from tests.end_to_end.test_page import MODULE, page_of, views
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
        page.get_by_role("button", name="Follow the latest").click()
        page.locator("#ended button", has_text="made").first.click()
        page.locator("#path tbody tr", has_text="decode").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.mouse.move(0, 0)
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
    for _ in range(2):
        server.post(ask([data_url(picture(1))], QUESTION))
    with tab(browser, page_of(server)) as shown:
        page = shown.page
        shown.wait_live()
        for name in ("Saved by hits", "Pipeline", "Path of a request", "Requests", "Ask", "Arena"):
            assert page.get_by_role("heading", name=name, exact=False).count() >= 1
        assert page.get_by_role("list", name="Lately ended").count() == 1
        button = page.locator("#ended button").last
        button.wait_for()
        button.focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-pressed") == "true"
        table = page.locator("#path")
        assert table.get_by_role("columnheader", name="Stage").count() == 1
        assert table.locator("tbody tr", has_text="accept").count() == 1
        page.wait_for_timeout(2500)
        assert page.evaluate("document.activeElement.tagName") == "BUTTON"
        assert button.get_attribute("aria-pressed") == "true"


def test_latest_request_is_open_and_its_stages_have_words(browser: Any, server: Server) -> None:
    answer = server.post(ask([data_url(picture(next(_NEW)))], QUESTION))
    with tab(browser, page_of(server)) as shown:
        page = shown.page
        page.locator("#path-id", has_text=answer.headers["x-request-id"]).wait_for()
        row = page.locator("#path tbody tr", has_text="decode").first
        row.hover()
        page.locator("#tip", has_text="decodes the file").wait_for()
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        later = server.post(ask([data_url(picture(2))], QUESTION))
        page.mouse.move(0, 0)
        page.locator("#path-id", has_text=later.headers["x-request-id"]).wait_for()


def test_savings_are_those_of_the_counts(browser: Any, server: Server) -> None:
    for _ in range(2):
        server.post(ask([data_url(picture(3))], QUESTION))
    with tab(browser, page_of(server)) as shown:
        page = shown.page
        shown.wait_live()
        with views(page_of(server)) as seen:
            wait_until(lambda: page.locator("#savings .time strong").inner_text().startswith("≈"))
            items = next(seen)["savings"]["num_items"]
        words = f"{items['hit']} hits of {sum(items.values())} items"
        page.locator("#savings .found p", has_text=words).wait_for()
        page.locator("#savings .time").focus()
        page.locator("#tip", has_text="An estimate: hits, times the measured mean").wait_for()


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


def test_dropped_file_that_is_no_image_is_refused_with_words(browser: Any, server: Server) -> None:
    with tab(browser, page_of(server)) as shown:
        page = shown.page
        shown.wait_live()
        data = page.evaluate_handle(
            """() => {
                const data = new DataTransfer();
                data.items.add(new File(["words"], "<b>notes</b>.txt", {type: "text/plain"}));
                return data;
            }"""
        )
        page.dispatch_event("#drop", "drop", {"dataTransfer": data})
        refusal = page.get_by_role("alert").filter(has_text="<b>notes</b>.txt is not an image")
        refusal.wait_for()
        assert page.locator("#preview").is_hidden()
        empty = page.evaluate_handle("new DataTransfer()")
        page.dispatch_event("#drop", "drop", {"dataTransfer": empty})
        page.get_by_role("alert").filter(has_text="That is not a file").wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_server_without_requests_then_gone_is_explained(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    """Take pictures of the empty page, and of the page after its server has ended."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server("--ui", "0", "--arena-nbytes", "64MiB"))
        shown = stack.enter_context(tab(browser, page_of(server), width=width, scheme=scheme))
        page = shown.page
        shown.wait_live()
        page.get_by_text("No hit yet.").wait_for()
        page.get_by_text("No request has ended yet.").wait_for()
        page.get_by_text("The arena is empty.").wait_for()
        page.screenshot(path=tmp_path / "empty.png")
        server.popen.terminate()
        page.get_by_role("alert").filter(has_text="The server does not answer").wait_for()
        page.get_by_role("alert").filter(has_text="are the last ones, of").wait_for()
        assert page.locator("#state.lost").count() == 1
        page.get_by_role("button", name="Try now").click()
        page.get_by_role("button", name="Ask", exact=True).click()
        page.locator("#answer.bad", has_text="The server does not answer").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=tmp_path / "gone.png")
        print(f"pictures in {tmp_path}")
        assert all("ERR_" in each or "network" in each.lower() for each in shown.complaints)
        shown.complaints.clear()


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


@contextlib.contextmanager
def muted_proxy(url: str) -> Iterator[tuple[str, threading.Event]]:
    """Forward connections; once the event is set, those that exist are silent, and stay open."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    is_muted, sockets = threading.Event(), list[socket.socket]()

    def pass_requests(
        client: socket.socket, server: socket.socket, is_old: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while (data := client.recv(1 << 16)) and not is_old.is_set():
                server.sendall(data)
            client.shutdown(socket.SHUT_RDWR)  # a request on an old connection is sent again

    def pass_answers(client: socket.socket, server: socket.socket, is_old: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if not is_old.is_set():
                    client.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection((host, int(port)))
                sockets.extend((client, server))
                is_old = threading.Event() if is_muted.is_set() else is_muted
                for work in (pass_requests, pass_answers):
                    pair = (client, server, is_old)
                    threading.Thread(target=work, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", is_muted
        listener.shutdown(socket.SHUT_RDWR)
        for each in sockets:
            each.close()


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_page_whose_connection_is_silent_opens_another(
    browser: Any, server: Server, is_asked: bool
) -> None:
    with muted_proxy(page_of(server)) as (url, is_muted), tab(browser, url) as shown:
        shown.wait_live()
        is_muted.set()
        if is_asked:  # the button works at any time
            shown.page.locator("#again").dispatch_event("click")
            said = "it tries again now"
        else:
            said = "nothing has arrived for"
        shown.page.get_by_role("alert").filter(has_text=said).wait_for()
        shown.wait_live()


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
