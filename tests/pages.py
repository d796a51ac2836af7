"""The pages of the documentation, taken apart: fenced blocks, and the prose around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
URL = "http://127.0.0.1:8000"
"""Of the server that the pages talk to."""
SHELLS = ("", "bash", "console", "sh")
WORD_FOR_WORD = {"docs/tutorial.md"}
"""Pages whose blocks of ``sh`` are followed in one shell, by `test_tutorial`."""

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
_FRAGMENT = re.compile(r"<!-- fragment: [^>]+ -->\n\Z")
_HEREDOC = re.compile(r"<<'?(\w+)'?$(.*?)^\1$", re.M | re.S)
_PRINTED = re.compile(r"\n```text\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """Of the page, on which the text begins."""
    language: str
    text: str
    is_fragment: bool
    """``<!-- fragment: why -->`` stands in the line above: no reader is to run it as it is."""
    printed: str | None
    """A block of ``text`` that follows at once: what this one prints."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """The blocks in these languages; all of them, if none is named."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        printed = _PRINTED.match(text, match.end() + 1)
        block = Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            text=match["text"],
            is_fragment=_FRAGMENT.search(text[: match.start()]) is not None,
            printed=printed[1] if printed else None,
        )
        if not languages or block.language in languages:
            found.append(block)
    return found


def without_blocks(page: Path) -> str:
    """What is left of a page, with as many lines."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def prose_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines that can be wrapped: no code, no tables, no headings, nothing in HTML."""
    for number, line in enumerate(without_blocks(page).splitlines(), start=1):
        if not line.startswith(("#", "<", "    ")) and not line.lstrip().startswith("|"):
            yield number, line


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", without_blocks(page))


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, one a line; what a transcript prints is left out."""
    text = _HEREDOC.sub("", block.text).replace("\\\n", " ")
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    elif not block.language:  # a drawing, as a rule
        lines = [line for line in lines if re.match(r"(make|afferent) ", line)]
    return [line for line in lines if line.strip() and not line.startswith("#")]
