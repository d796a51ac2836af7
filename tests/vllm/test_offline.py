"""`afferent.vllm.LLM`, in vLLM's own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.pages import DOCS, Block, blocks_of
from tests.vllm.servers import ENV, python, run_inside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_outputs_are_those_of_vllm_for_all_prompts_and_faults() -> None:
    """One engine for all checks: its start takes a minute."""
    assert "all checked\n" in run_inside("tests.vllm.offline")


@pytest.mark.parametrize("block", blocks_of(DOCS / "offline-vllm.md", "python"), ids=["page"])
def test_the_program_of_the_page_prints_what_it_shows(block: Block, tmp_path: Path) -> None:
    (file := tmp_path / "example.py").write_text(block.text)
    done = subprocess.run(
        [python(), file],
        cwd=tmp_path,
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert block.printed is not None
    assert block.printed in done.stdout, "between vLLM's own lines"
