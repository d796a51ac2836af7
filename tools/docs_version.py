"""Add this version's documentation to the site of all versions.

mike builds the pages and commits them to a branch of this repository: a folder for each minor
version, ``next`` for what is not released, and a menu that lists them. A host of static pages
serves the branch as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools import site_pages


def main(arguments: list[str]) -> int:
    """Build and commit the pages.

    Args:
        arguments: Options of ``mike deploy``, such as ``--push`` or ``--branch NAME``.
    """
    name, title = site_pages.version((site_pages.ROOT / site_pages.CHANGES[0]).read_text())
    if name == "next":
        return _mike("deploy", "--title", title, *arguments, name)
    status = _mike("deploy", "--title", title, *arguments, "--update-aliases", name, "latest")
    return status or _mike("set-default", *arguments, "latest")


def _mike(*arguments: str) -> int:
    """Run mike, which runs MkDocs by name."""
    programs = Path(sys.executable).parent
    paths = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(programs / "mike"), *arguments]
    return subprocess.run(command, cwd=site_pages.ROOT, env=paths, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
