"""Models with a process for each rank choose the same tokens as the whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from afferent.builtin.engine.model.group import Group
from afferent.builtin.engine.model.runner import load_model
from afferent.builtin.engine.model.shards import keep_shard
from afferent.errors import ConfigError, UnsupportedModel
from tests.engine import families
from tests.engine.rank import RECIPES
from tests.engine.runner_model import FOUR_HEADS, MODELS


def run_ranks(size: int, folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results of all ranks for all models."""
    for name in names:
        if make := RECIPES[name].make:
            (folder / name).mkdir()
            make(folder / name)
    command = [sys.executable, "-m", "tests.engine.rank", str(size), str(folder), *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(each["model"] for each in said) == dict.fromkeys(names, size)
    return said


def check(size: int, folder: Path, names: Sequence[str]) -> None:
    for each in run_ranks(size, folder, names):
        assert "error" not in each
        assert each["tokens"] == each["expected"]
        # Each rank has the norms and some biases besides its shard of the matrices.
        assert each["num_weights"] < each["whole"] / size * 1.1


def test_two_ranks(tmp_path: Path) -> None:
    check(2, tmp_path, ["shapes", "qwen3", "gemma3"])


@pytest.mark.parametrize(
    ("make", "size", "error", "words"),
    [
        (families.make_whisper, 2, UnsupportedModel, "no plan"),
        (FOUR_HEADS.make, 3, ConfigError, "4 and 4 heads"),
        (MODELS["qwen2"].make, 4, ConfigError, "4 and 2 heads"),
    ],
)
def test_models_that_cannot_be_sharded(
    tmp_path: Path, make: Any, size: int, error: type[Exception], words: str
) -> None:
    make(tmp_path)
    with pytest.raises(error, match=words):
        keep_shard(load_model(tmp_path), Group(None, rank=0, size=size))


@pytest.mark.storm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "names"), [(2, sorted({*MODELS} - {"whisper"})), (4, ["four heads"])]
)
def test_all_models(tmp_path: Path, size: int, names: list[str]) -> None:
    check(size, tmp_path, names)


def test_only_this_machine_is_listened_to() -> None:
    group = Group.host(2)
    for file in ("tcp", "tcp6"):
        lines = Path("/proc/net", file).read_text().splitlines()[1:]
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        addresses = {
            a for a, port in (each.split(":") for each in listening) if int(port, 16) == group.port
        }
        assert addresses == ({"0100007F"} if file == "tcp" else set())


def test_ranks_that_there_are_not() -> None:
    for rank in (0, 2, -1):
        with pytest.raises(ConfigError):
            Group.join(1, rank=rank, size=2)
