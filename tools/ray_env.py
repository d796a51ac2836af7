"""Make an environment with Ray, `datasets`, torchvision, and all development packages.

    python -m tools.ray_env [FOLDER] [--version 2.60.0]

These and their dependencies are installed into this environment alone (600 MB). All other packages
are imported from the development environment, which does not change.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.vllm_env import packages_of, python_of, without_operators_of_cuda

FOLDER: Final = Path(__file__).parents[1] / ".venv-ray"
WANTED: Final = "ray[data,serve]>=2.60"
DATASETS: Final = "datasets>=4"
"""Package of an example."""
_ALONE: Final = ("torchvision==0.28.*",)
"""Installed without what it depends on, which the development environment has: its torch."""


def make(folder: Path, *wanted: str, alone: Sequence[str] = ()) -> None:
    """Make or update an environment with these packages, beside all those of this one.

    Args:
        alone: Packages that are installed without those that they depend on.
    """
    venv.create(folder, with_pip=True)
    pip = (str(python_of(folder)), "-m", "pip", "--disable-pip-version-check")
    subprocess.run([*pip, "install", *wanted], check=True)
    if alone:
        subprocess.run([*pip, "install", "--no-deps", *alone], check=True)
    ours = sysconfig.get_paths()["purelib"]
    # Unlike a bare path, `addsitedir` also reads the .pth files of editable installs.
    line = f"import site; site.addsitedir({ours!r})\n"
    (packages_of(folder) / "afferent-development.pth").write_text(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--version", help=f"of Ray (without: {WANTED})")
    args = parser.parse_args()
    wanted = f"ray[data,serve]=={args.version}" if args.version else WANTED
    make(args.folder, wanted, DATASETS, alone=_ALONE)
    without_operators_of_cuda(packages_of(args.folder))


if __name__ == "__main__":
    main()
