"""The documentation says what is there: links, commands, flags; and the README's request works."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from afferent import config
from afferent.bench.run import BENCHMARKS
from tests.server import Server

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert set(commands) <= targets
    for name in re.findall(r"afferent bench ([a-z]+)", text):
        assert name in BENCHMARKS
    known = {"--" + key.replace("_", "-") for key in config.field_names()}
    for flag in re.findall(r"afferent serve[^\n`]*?(--[a-z-]+)", text):
        assert flag in known | {"--help", "--config"}


def test_every_make_target_is_listed() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = "setup serve test lint type fmt bench docs check clean"
    for target in targets.split():
        assert f"make {target} " in listed.stdout


def test_the_readmes_request(server: Server) -> None:
    """Word for word, but for the port."""
    (request,) = [block for block in blocks(ROOT / "README.md", "bash") if "curl" in block]
    (answer,) = list(blocks(ROOT / "README.md", "json"))
    command = request.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    content = r'"content":"([^"]*)"'
    said, printed = re.search(content, done.stdout), re.search(content, answer)
    assert said is not None, done.stdout
    assert printed is not None
    assert said[1] == printed[1]
