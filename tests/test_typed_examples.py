"""The types of the documentation's programs are checked, and what is wrong is reported."""

from __future__ import annotations

import pytest

from tests.pages import DOCS, ROOT
from tools.typed_examples import Program, check, programs

WRONG = """
from afferent import ItemCache, LocalStore, MiB

with LocalStore(MiB) as store:
    ItemCache(store).get_data("request", [b"no key"])
"""
RIGHT = WRONG.replace('b"no key"', "")


def test_programs_are_those_of_the_pages() -> None:
    found = programs([ROOT / "README.md", DOCS / "library.md", DOCS / "store.md"])
    pages = [program.page for program in found.values()]
    assert pages.count(ROOT / "README.md") == 2
    assert pages.count(DOCS / "library.md") == 6
    assert pages.count(DOCS / "store.md") == 1, "its blocks belong together"
    for name, program in found.items():
        compile(program.text, name, "exec", dont_inherit=True)


def test_lines_of_a_program_are_those_of_its_page() -> None:
    page = (ROOT / "README.md").read_text().splitlines()
    for program in programs([ROOT / "README.md"]).values():
        lines = program.text.splitlines()
        begin = next(number for number, line in enumerate(lines) if line)
        assert lines[begin:] == page[begin : len(lines)]


@pytest.mark.timeout(240)
def test_wrong_types_of_a_program_are_found_by_both_checkers() -> None:
    wrong, right = Program(ROOT / "README.md", WRONG), Program(DOCS / "library.md", RIGHT)
    complaints = check({"wrong": wrong, "right": right})
    mypy, pyright = complaints.split("pyright:")
    for told in (mypy, pyright):
        assert "README.md:5" in told
        assert "ContentKey" in told
    assert "library.md" not in complaints
