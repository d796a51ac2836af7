"""One rank of models that are tested: a process of `tests.engine.test_group`.

    python -m tests.engine.rank RANK SIZE FOLDER MODEL...

``FOLDER`` holds the models' folders by their names. Rank 0 prints its port, the others read it.
Then each prints a line for each model: JSON with the answers that it chose, and those of the whole
model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from afferent.engine.group import Group
from afferent.errors import AfferentError
from tests.engine.random_steps import RandomSteps
from tests.engine.runner_model import FOUR_HEADS, MODELS, prepare_all

RECIPES = {**MODELS, "four heads": FOUR_HEADS}


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        group = Group.host(size)
        print(group.port, flush=True)
    else:
        group = Group.join(int(sys.stdin.readline()), rank=rank, size=size)
    for name in names:
        print(json.dumps(run(name, folder / name, group)), flush=True)
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
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
