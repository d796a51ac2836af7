"""The documentation says what is there: links, commands, flags; and the README's request works."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afferent import config
from afferent.bench.run import BENCHMARKS
from afferent.operate.arguments import add_store
from afferent.store.local import LocalStore
from afferent.types import ContentKey, MiB
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
    verbs = store_verbs()
    for verb, rest in re.findall(r"afferent store ([a-z]+)([^\n`]*)", text):
        assert verb in verbs
        assert set(re.findall(r"--[a-z-]+", rest)) <= verbs[verb]


def test_the_guide_to_the_store_runs() -> None:
    """All of its examples, one after another."""
    with LocalStore(4 * MiB) as store:
        pixels, grid = np.ones((4, 8), np.float32), np.array([[1, 2, 2]])
        trees = {ContentKey(bytes([n]) * 32): {"pixel_values": pixels * n} for n in range(3)}
        names = {
            "store": store,
            "core": store,
            "workers": [store],
            "pixels": pixels,
            "grid": grid,
            "trees": trees,
            "sizes": dict.fromkeys(trees, 1000),
            "encode": lambda tree: tree["pixel_values"] * 2,
            "digest_of_the_encoder": b"digest",
        }
        found = blocks(ROOT / "docs/store.md", "python")
        assert len(found) == 5
        for block in found:
            exec(block, names)  # noqa: S102
        assert store.stat().held_nbytes == 0
        assert store.stat().num_objects == 6


@pytest.mark.parametrize(
    ("page", "number"), [*(("library.md", number) for number in range(4)), ("gate.md", 0)]
)
def test_the_librarys_examples_run(page: str, number: int, tmp_path: Path) -> None:
    """As a reader would: each is a file of its own, and prints what the page says."""
    path = ROOT / "docs" / page
    programs, outputs = blocks(path, "python"), blocks(path, "text")
    assert len(programs) == len(outputs) == (4 if page == "library.md" else 1)
    file = tmp_path / "example.py"
    file.write_text(programs[number])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.stderr) == (outputs[number], "")


def test_every_store_command_is_documented() -> None:
    text = (ROOT / "docs/operating-the-store.md").read_text()
    for verb, flags in store_verbs().items():
        assert f"$ afferent store {verb}" in text
        for flag in flags - {"--help"}:
            assert flag in text, f"{flag} of {verb}"


def store_verbs() -> dict[str, set[str]]:
    """The flags of each command below ``afferent store``."""
    commands = argparse.ArgumentParser().add_subparsers()
    add_store(commands)
    (verbs,) = [
        action
        for action in commands.choices["store"]._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return {
        verb: {flag for flag in parser._option_string_actions if flag.startswith("--")}
        for verb, parser in verbs.choices.items()
    }


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


@pytest.mark.parametrize("page", ["responses.md", "anthropic.md"])
def test_the_clients_examples_run(page: str, server: Server, tmp_path: Path) -> None:
    """Word for word, but for the port."""
    (program,), (output,) = (blocks(ROOT / "docs" / page, kind) for kind in ("python", "text"))
    file = tmp_path / "example.py"
    file.write_text(program.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == (output, "")


def test_the_apis_example(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same answer for a picture that is sent, and for its name alone."""
    (program,) = blocks(ROOT / "docs/api.md", "python")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(program.replace("http://127.0.0.1:8000", server.url), names)  # noqa: S102
    names["client"].close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("a ")
