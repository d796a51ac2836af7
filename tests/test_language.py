"""The check of the language of docstrings and pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import language

CODE = '''"""{module}"""


class Thing:
    """A thing."""

    def use(self) -> None:
        """{function}"""
'''


def found(path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text)
    return [(breach.line, breach.message.split(":")[0]) for breach in language.breaches(path)]


@pytest.mark.parametrize("first", ["What", "Who", "Of", "Which", "Nobody", "Whatever"])
def test_docstring_that_begins_with_a_refused_word_is_found(tmp_path: Path, first: str) -> None:
    text = CODE.format(module="A module.", function=f"{first} it is.")
    assert (8, f'a docstring begins with "{first}"') in found(tmp_path / "a.py", text)


def test_pronoun_in_a_docstring_is_found_at_its_line(tmp_path: Path) -> None:
    text = CODE.format(module="A module.\n\nWhoever calls it waits.", function="Use it.")
    assert found(tmp_path / "a.py", text) == [(3, '"Whoever"')]


@pytest.mark.parametrize("first", ["Offset of a block.", "Whole blocks.", "Whitespace.", "Use it."])
def test_plain_docstring_passes(tmp_path: Path, first: str) -> None:
    assert found(tmp_path / "a.py", CODE.format(module="A module.", function=first)) == []


def test_pronoun_on_a_page_is_found(tmp_path: Path) -> None:
    assert found(tmp_path / "a.md", "# A page\n\nNobody waits.\n") == [(3, '"Nobody"')]


def test_file_that_is_gone_is_no_longer_checked() -> None:
    with pytest.raises(FileNotFoundError, match="is listed"):
        list(language.files(("docs/gone.md",)))
