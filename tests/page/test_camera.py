"""The page of the tutorial on live sessions, in a real browser with a fake camera.

``make test-page`` runs it.
"""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import CAMERA, launched
from tests.server import Server, wait_until

pytestmark = [pytest.mark.page, pytest.mark.timeout(300)]

TUTORIAL = Path(__file__).parents[2] / "docs" / "live-sessions.md"
ITEMS = 'afferent_live_items_total{outcome="added"}'


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder; yield it and its origin."""
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_camera_page_of_the_tutorial_sends_frames_and_shows_an_answer(
    site: tuple[Path, str],
) -> None:
    folder, origin = site
    page_text = re.search(r"```html\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert page_text is not None
    script = page_text[1].partition('<script type="module">\n')[2].partition("</script>")[0]
    assert len(script.splitlines()) == 10
    with Server("--cors-origin", origin) as server, launched(*CAMERA) as browser:
        address = server.url.removeprefix("http://")
        (folder / "camera.html").write_text(page_text[1].replace("127.0.0.1:8000", address))
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{origin}/camera.html")
        wait_until(lambda: server.metrics().get(ITEMS, 0) >= 4)
        page.locator("#question").fill("What is in the picture?")
        page.locator("#question").press("Enter")
        page.wait_for_function("document.getElementById('answer').textContent.length > 3")
        assert errors == []
