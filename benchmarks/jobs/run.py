"""Run one of the programs, and print how long it took and what it returned, as JSON.

python -m benchmarks.jobs.run NAME MODEL FOLDER COUNT
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from pathlib import Path

import msgspec


class Ran(msgspec.Struct, frozen=True):
    wall_s: float
    returned: int


def main(name: str, model: str, folder: str, count: str) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    paths = [str(path) for path in sorted(Path(folder).iterdir())[: int(count)]]
    program = importlib.import_module(f"benchmarks.jobs.{name}")
    start_s = time.perf_counter()
    returned = program.main(model, paths)
    ran = Ran(time.perf_counter() - start_s, returned)
    print(msgspec.json.encode(ran).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
