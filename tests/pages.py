"""The pages of the documentation: their fenced blocks, and the prose around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
URL = "http://127.0.0.1:8000"
"""The address of the server in the pages."""
SHELLS = ("", "bash", "console", "sh")
WORD_FOR_WORD = {"docs/tutorial.md"}
"""Pages whose ``sh`` blocks `test_tutorial` runs in one shell."""

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
_FRAGMENT = re.compile(r"<!-- fragment: [^>]+ -->\n\Z")
_HEREDOC = re.compile(r"<<'?(\w+)'?$(.*?)^\1$", re.M | re.S)
_PRINTED = re.compile(r"\n```text\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """The line of the page on which the text begins."""
    language: str
    text: str
    is_fragment: bool
    """A ``<!-- fragment: why -->`` in the line above says that the block can't be run alone."""
    printed: str | None
    """The text of a ``text`` block directly below: the expected output."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """Return the blocks in these languages, or all blocks if none is given."""
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
    """Return a page with its blocks replaced by empty lines."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def prose_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Yield lines that can be wrapped: no code, tables, headings or HTML."""
    for number, line in enumerate(without_blocks(page).splitlines(), start=1):
        if not line.startswith(("#", "<", "    ")) and not line.lstrip().startswith("|"):
            yield number, line


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", without_blocks(page))


def commands_of(block: Block) -> list[str]:
    """Return the commands of a shell block, one a line, without the output in a transcript."""
    text = _HEREDOC.sub("", block.text).replace("\\\n", " ")
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    elif not block.language:  # usually a drawing
        lines = [line for line in lines if re.match(r"(make|afferent) ", line)]
    return [line for line in lines if line.strip() and not line.startswith("#")]
