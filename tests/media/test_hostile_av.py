"""Damaged video and audio files only fail with a typed error, within limits of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MAX_CASE_S = 10.0
"""Of processor time."""
MAX_CASE_KB = 300_000
MAX_ALL_S = 900.0
"""On a busy machine; on an idle one, the test takes a minute or two."""


@pytest.mark.timeout(1000)
def test_hostile_files() -> None:
    wrong: list[str] = []
    outcomes: dict[str, int] = {}
    first = 0
    while first >= 0:
        done = subprocess.run(
            [sys.executable, "-m", "tests.hostile_av", str(first)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MAX_ALL_S,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for (_, name, kind), (outcome, took_s, more_kb) in zip(
            lines[::2], lines[1::2], strict=False
        ):
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if outcome.startswith("raised") or took_s > MAX_CASE_S or more_kb > MAX_CASE_KB:
                wrong.append(f"{kind}, {name}: {outcome}, {took_s} s, {more_kb} kB")
        first = -1
        if done.returncode != 0 and lines:  # go on with the case behind the fatal one
            number, name, kind = lines[-2 + len(lines) % 2]
            wrong.append(f"{kind}, {name}: the process died ({done.returncode})")
            first = number + 1
        elif done.returncode != 0:
            wrong.append(f"the process died before the first case ({done.returncode})")
    assert not wrong, "\n".join(wrong)
    codes = {"ok", "invalid_media", "unsupported_media", "media_too_large"}
    assert outcomes.keys() == codes
    assert sum(outcomes.values()) > 500
