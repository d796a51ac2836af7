"""The example of the documentation runs, and prints the documented output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulated_engine.py"
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "scheduling.md"


def test_the_simulated_engine_prints_its_timeline() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(max(lines, key=len)) <= 120
    for word in ("preempted", "film 1", "●", "call hangs up"):
        assert word in done.stdout
    assert done.stdout.count(" end") == 3, "each of the three requests ends"
    documented = DOCUMENTATION.read_text()
    for line in lines:
        assert line.strip() in documented
