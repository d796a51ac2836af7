"""A real browser and the messages of its console."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The tests may run as root, in a container with a small /dev/shm.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"]
CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
"""Arguments for a fake camera, which pages may use."""


@dataclass
class Tab:
    """A browser tab with the errors and warnings of its console."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def wait_live(self) -> None:
        self.page.locator("#state.live").wait_for()


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator[Any]:
    """Start a browser, with further arguments; skip the test if there is none, or no driver."""
    driver = pytest.importorskip("playwright.sync_api", reason="pip install '.[page]'")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"there is none of {', '.join(NAMES)}: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *arguments])
        yield browser
        browser.close()


@contextlib.contextmanager
def tab(
    browser: Any, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[Tab]:
    """Open the page in a tab; check at the end that there were no errors or warnings."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1.5
    )
    context.set_default_timeout(30_000)
    opened = Tab(context.new_page())
    try:
        opened.page.goto(url)
        yield opened
        assert opened.complaints == []
    finally:
        context.close()
