"""`afferent.vllm.LLM`, in vLLM's own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DOCS, Block, blocks_of
from tests.vllm.servers import run_block, run_inside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_outputs_are_those_of_vllm_for_all_prompts_and_faults() -> None:
    """One engine for all checks: its start takes a minute."""
    assert "all checked\n" in run_inside("tests.vllm.offline")


@pytest.mark.parametrize(
    "block", blocks_of(DOCS / "offline-vllm.md", "python"), ids=["chat", "stage of Ray"]
)
def test_the_programs_of_the_page_print_what_they_show(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)
