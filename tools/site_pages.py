"""The pages and links of the documentation's site.

Pages link to each other, to folders, and to files outside of ``docs/``, as a repository viewer
follows links. On the site a folder is its ``README.md``, and a file outside of ``docs/`` is a page
below ``source/`` that shows it, so that the site needs neither a network nor the repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = "source"
CHANGES = ("CHANGELOG.md", "changes.md")
"""The change log, and its page."""
NOTES = ("adr/", "benchmarks/", "changes.", f"{SOURCE}/")
"""Pages that the search shows below how-tos and reference."""

_LINK = re.compile(r"\]\(([^()\s#]+)(#[^()\s]*)?\)")
_LANGUAGES = {".py": "python", ".toml": "toml"}


def expand_nav(nav: list[Any], pages: list[str]) -> list[Any]:
    """Return the navigation with each ``folder/*.md`` replaced by the pages of the folder."""
    named = set(named_pages(nav))
    return [
        item
        for entry in nav
        for item in _expanded(entry, sorted(page for page in pages if page not in named))
    ]


def named_pages(nav: list[Any]) -> Iterator[str]:
    """Return the pages of a navigation, in order."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from named_pages(value if isinstance(value, list) else [value])


def outside_target(target: str, location: str) -> str | None:
    """Return the path of a file outside of ``docs/`` that a page links to, or ``None``.

    Args:
        target: The link, without its fragment.
        location: The path of the page in the repository.
    """
    if "://" in target:
        return None
    path = normpath(f"{location}/../{target}")
    is_outside = not path.startswith((f"{DOCS.name}/", "../", "/"))
    return path if is_outside and (ROOT / path).is_file() else None


def outside_targets(markdown: str, location: str) -> set[str]:
    found = {outside_target(match[1], location) for match in _LINK.finditer(markdown)}
    return {path for path in found if path is not None}


def page_of(path: str) -> str:
    """Return the page below ``docs/`` that shows a file outside of it."""
    if path == "README.md":
        return "index.md"
    if path == CHANGES[0]:
        return CHANGES[1]
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def source_page(path: str) -> str:
    """Return a file of the repository as Markdown."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = _LANGUAGES.get(Path(path).suffix, "text")
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"# {Path(path).name}\n\n`{path}`\n\n{fence}{language}\n{text}{fence}\n"


def site_links(markdown: str, page: str) -> str:
    """Return the text with links to the places of their targets on the site.

    Args:
        page: The page's path below ``docs/``.
    """
    location = location_of(page)
    is_outside = not location.startswith(f"{DOCS.name}/")

    def link(match: re.Match[str]) -> str:
        target, fragment = match[1], match[2] or ""
        inside = f"{normpath(f'{location}/../{target}')}/README.md"
        if path := outside_target(target, location):
            # The headings of the README differ from those of the site's first page.
            fragment = "" if path == "README.md" else fragment
            return f"]({relpath(page_of(path), f'{page}/..')}{fragment})"
        if "://" not in target and (ROOT / inside).is_file():
            there = inside.removeprefix(f"{DOCS.name}/")
            return f"]({relpath(there, f'{page}/..')}{fragment})"
        if (
            is_outside
            and "://" not in target
            and (ROOT / normpath(f"{location}/../{target}")).is_file()
        ):
            there = normpath(f"{location}/../{target}").removeprefix(f"{DOCS.name}/")
            return f"]({relpath(there, f'{page}/..')}{fragment})"
        return match[0]

    return _LINK.sub(link, markdown)


def location_of(page: str) -> str:
    """Return the path in the repository of the text of a page."""
    if page == CHANGES[1]:
        return CHANGES[0]
    return page.removeprefix(f"{SOURCE}/") if page.startswith(SOURCE) else f"{DOCS.name}/{page}"


def version(changes: str) -> tuple[str, str]:
    """Return the name and the title of the version that the pages describe.

    Args:
        changes: The text of the change log. Below the heading of its newest version stands what
            changed since the one before.

    Returns:
        The minor version and the whole one, such as ``("0.2", "0.2.0")``. Where changes are not
        released yet, ``("next", "after 0.2.0")``.
    """
    newest, *older = re.split(r"^## ", changes, flags=re.MULTILINE)[1:]
    heading, _, text = newest.partition("\n")
    is_open = heading.strip() == "Unreleased"
    released = (older[0] if is_open else newest).split()[0]
    if is_open and text.strip():
        return "next", f"after {released}"
    return released.rpartition(".")[0], released


def _expanded(entry: Any, rest: list[str]) -> list[Any]:
    if isinstance(entry, str):
        if not entry.endswith("*.md"):
            return [entry]
        folder = entry.removesuffix("*.md")
        return [page for page in rest if page.startswith(folder)]
    return [
        {
            title: [item for part in value for item in _expanded(part, rest)]
            if isinstance(value, list)
            else value
            for title, value in entry.items()
        }
    ]
