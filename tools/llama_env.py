"""Make an environment with llama.cpp's server, which is compiled here (ten minutes).

    python -m tools.llama_env [FOLDER]

It needs a compiler for C++. ``gguf`` writes the models of the tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tools.ray_env import make

FOLDER: Final = Path(__file__).parents[1] / ".venv-llama"
WANTED: Final = ("llama-cpp-python[server]>=0.3.36", "gguf>=0.19")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    make(parser.parse_args().folder, *WANTED)


if __name__ == "__main__":
    main()
