"""Environments with the tested clients, one each: from pip, and from npm.

    python -m tools.clients_env [NAME ...]

It takes some minutes and 6 GB. The npm client needs Node.js. Without names, it makes all but the
large environments.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from tests.clients.table import ENVIRONMENTS, LARGE

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / ".venv-clients"
NODE: Final = "node"


def make(names: Collection[str]) -> None:
    """Make or update the environments of these names."""
    for name in names:
        packages = ENVIRONMENTS[name]
        print(f"==> {name}: {', '.join(packages)}", flush=True)
        folder = FOLDER / name
        if name == NODE:
            _install_modules(folder, packages)
        else:
            venv.create(folder, with_pip=True)
            pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)


def _install_modules(folder: Path, modules: Sequence[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is not there: install Node.js (of Debian: apt-get install nodejs npm)")
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
    subprocess.run([npm, "install", *quiet, *modules], cwd=folder, check=True)


if __name__ == "__main__":
    make(sys.argv[1:] or [name for name in ENVIRONMENTS if name not in LARGE])
