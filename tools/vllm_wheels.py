"""Report whether a version of vLLM has the parts that Afferent uses, without installing it.

    python -m tools.vllm_wheels 0.33.0 [--against 0.32.0]

The wheels are downloaded; that of a GPU build will do (300 MB). Nothing of them is executed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from afferent.engines.vllm.plugin import probe
from afferent.engines.vllm.plugin.hooks import HOOKS
from afferent.engines.vllm.plugin.sources import Sources

_TESTED: Final = "0.32.0"
"""Version that all tests have run with."""


def _wheel(version: str, folder: Path) -> Path:
    """Download the wheel of a version into a folder of its own."""
    place = folder / version
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--dest", place, f"vllm=={version}"], check=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="such as 0.33.0")
    parser.add_argument("--against", default=_TESTED, help="version to compare it with")
    args = parser.parse_args()
    if args.version is None:
        parser.error("which version? make probe-vllm VERSION=0.33.0")
    with tempfile.TemporaryDirectory(prefix="afferent-wheels-") as folder:
        new, old = (_wheel(each, Path(folder)) for each in (args.version, args.against))
        print(f"vLLM {args.version}, compared with {args.against}:")
        print("\n".join(probe.report(Sources(new), Sources(old))))
        sys.exit(bool(probe.missing(HOOKS, Sources(new).find)))


if __name__ == "__main__":
    main()
