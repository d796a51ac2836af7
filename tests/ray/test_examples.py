"""Examples of training and of data sets, which take too long for the default tests, or packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def run(example: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loss_falls_in_the_example_of_fine_tuning(tmp_path: Path) -> None:
    found = re.findall(r"the loss is (\S+), from (\S+)", run("fine_tune.py", tmp_path))
    assert len(found) == 2
    last, first = map(float, found[-1])
    assert last < first / 2


def test_the_example_of_datasets_has_features_of_all_good_images(tmp_path: Path) -> None:
    assert run("datasets_map.py", tmp_path).splitlines() == [
        "39 of 40 images have features",
        "uint8 (80, 588) red: 3",
    ]
