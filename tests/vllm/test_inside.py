"""Checks that run in vLLM's own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.servers import ENV, python

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "what", ["fields", "many", "refusals", "hooks", "names", "connector", "labels", "killed"]
)
def test_in_vllms_environment(what: str) -> None:
    done = subprocess.run(
        [python(), "-m", "tests.vllm.inside", what],
        cwd=ROOT,
        env={**os.environ, **ENV},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
