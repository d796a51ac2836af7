"""The ranks of models under test: processes of `tests.engine.test_group`.

    python -m tests.engine.rank SIZE FOLDER MODEL...

``FOLDER`` holds the models' folders by their names. Each rank prints a line of JSON for each model:
its answers, and those of the whole model. All ranks are forked from one process after its slow
imports.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from afferent.builtin.engine.model.group import Group
from afferent.errors import AfferentError
from afferent.runtime.process import die_with_parent
from tests.engine.random_steps import RandomSteps
from tests.engine.runner_model import FOUR_HEADS, MODELS, prepare_all

RECIPES = {**MODELS, "four heads": FOUR_HEADS}


def main(size: int, folder: Path, names: list[str]) -> int:
    """Fork the other ranks; rank 0 is this process, and sends its port to them."""
    parent, pipes, others = os.getpid(), [os.pipe() for _ in range(size - 1)], []
    for rank, (read, _) in enumerate(pipes, start=1):
        if (pid := os.fork()) == 0:
            die_with_parent(parent)
            port = int.from_bytes(os.read(read, 2))
            run_all(folder, names, Group.join(port, rank=rank, size=size))
            return 0
        others.append(pid)
    group = Group.host(size)
    for _, write in pipes:
        os.write(write, group.port.to_bytes(2))
    run_all(folder, names, group)
    return max(os.waitpid(pid, 0)[1] for pid in others)


def run_all(folder: Path, names: list[str], group: Group) -> None:
    torch.set_num_threads(1)
    for name in names:
        said = {"model": name, **run(name, folder / name, group)}
        os.write(1, json.dumps(said).encode() + b"\n")  # one write, as other ranks write there too
    group.close()


def run(name: str, folder: Path, group: Group) -> dict[str, object]:
    try:
        model = RECIPES[name].load(folder, group)
    except AfferentError as error:
        return {"error": error.message}
    prepared = prepare_all(model)
    steps = RandomSteps(model, prepared, np.random.default_rng(1))
    steps.run()
    text = model.runner._model.get_decoder()
    return {
        "tokens": list(steps.tokens.values()),
        "expected": [each.expected for each in prepared],
        "num_weights": sum(weight.numel() for weight in text.layers.parameters()),
        "whole": sum(w.numel() for w in model.reference.get_decoder().layers.parameters()),
    }


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]) != 0)
