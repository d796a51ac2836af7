"""Check docstrings and pages: ``python -m tools.language``, a part of ``make lint``.

- A docstring begins with a verb or with a noun phrase, not with a word such as "What" or "Of".
- Docstrings and pages name the actor instead of a pronoun for any person: see `_PRONOUN`.

`CHECKED` lists the files and folders that follow these rules; it only becomes longer. With
``--count``, print how often each folder breaks them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).parent.parent
_RECORDS: Final = _ROOT / "docs" / "benchmarks" / "records.md"
_FIRST: Final = re.compile(
    r"(What|Who|Whose|Whom|Of|How|Where|Which|Nobody|Everybody|Somebody|Whoever|Whatever)\b"
)
_PRONOUN: Final = re.compile(
    r"(?<!-)\b(nobody|everybody|somebody|whoever|whatever)\b(?!-)",
    re.IGNORECASE,  # hyphens: not in the names of files
)
_DEFINITIONS: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

CHECKED: Final = (
    "README.md",
    "benchmarks",
    "docs",
    "examples",
    "src/afferent",
    "tests",
    "tools",
    "training",
)


class Breach(NamedTuple):
    """A breach of a rule at one line."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(_ROOT)}:{self.line}: {self.message}"


def breaches(path: Path) -> Iterator[Breach]:
    """Yield the breaches of a Python file or of a page."""
    if path == _RECORDS:  # it has the names of cases, as the records have
        return
    text = path.read_text()
    if path.suffix == ".md":
        yield from _pronouns(path, text, 1)
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _DEFINITIONS) or (doc := ast.get_docstring(node)) is None:
            continue
        line = node.body[0].lineno
        if found := _FIRST.match(doc):
            yield Breach(path, line, f'a docstring begins with "{found[0]}": name the thing')
        yield from _pronouns(path, doc, line)


def _pronouns(path: Path, text: str, line: int) -> Iterator[Breach]:
    for number, each in enumerate(text.splitlines()):
        for found in _PRONOUN.finditer(each):
            yield Breach(path, line + number, f'"{found[0]}": name the actor')


def files(names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the Python files and pages of files and folders.

    Raises:
        FileNotFoundError: One of them does not exist.
    """
    for name in names:
        path = _ROOT / name
        if path.is_dir():
            yield from sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        elif path.exists():
            yield path
        else:
            raise FileNotFoundError(f"{name} is listed in tools/language.py, and is not there")


def _count() -> None:
    numbers: Counter[str] = Counter()
    folders = ("src", "tests", "tools", "benchmarks", "examples", "docs")
    for path in files(folders):
        parts = path.relative_to(_ROOT).parts
        numbers["/".join(parts[: 3 if parts[0] == "src" else 1])] += len(list(breaches(path)))
    for folder, number in sorted(numbers.items()):
        print(f"{number:6,} {folder}")


def main() -> int:
    """Print all breaches; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="language", description="Check docstrings and pages.")
    parser.add_argument("--count", action="store_true", help="count the breaches of all folders")
    if parser.parse_args().count:
        _count()
        return 0
    found = [breach for path in files(CHECKED) for breach in breaches(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
