"""Add this version's documentation to the site of all versions.

mike builds the pages and commits them to a branch of this repository: a folder for each minor
version, ``next`` for what is not released, and a menu that lists them. A host of static pages
serves the branch as it is. Its first page leads to the newest release, or to ``next`` before any.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tools import site_pages


def main(arguments: list[str]) -> int:
    """Build and commit the pages.

    Args:
        arguments: Options of git that ``mike deploy``, ``delete`` and ``set-default`` have, such as
            ``--push`` or ``--branch NAME``.
    """
    name, title = site_pages.version((site_pages.ROOT / site_pages.CHANGES[0]).read_text())
    where = [each for each in arguments if each not in ("--push", "-p")]
    listed = json.loads(_mike("list", "--json", *where, is_read=True))
    releases = [each["version"] for each in listed if each["version"] != "next"]
    deploy = ["deploy", "--title", title, *arguments]
    if name == "next":
        _mike(*deploy, name)
        if not releases:
            _mike("set-default", *arguments, name)
        return 0
    if any(_numbers(name) < _numbers(each) for each in releases):
        _mike(*deploy, name)
        return 0
    _mike(*deploy, "--update-aliases", name, "latest")
    if len(releases) < len(listed):  # what it described is released
        _mike("delete", *arguments, "next")
    _mike("set-default", *arguments, "latest")
    return 0


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _mike(*arguments: str, is_read: bool = False) -> str:
    """Run mike, which runs MkDocs by its name; return its output if it ``is_read``."""
    programs, root = Path(sys.executable).parent, site_pages.ROOT
    paths = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [str(programs / "mike"), *arguments],
        cwd=root,
        env={**os.environ, "PATH": paths, "PYTHONPATH": str(root)},
        check=True,
        stdout=subprocess.PIPE if is_read else None,
        text=True,
    )
    return done.stdout or ""


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
