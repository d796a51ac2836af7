"""The example of reinforcement learning, and the program of its page, in vLLM's environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import DOCS, Block, blocks_of
from tests.vllm.servers import run_block, run_inside

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def printed() -> str:
    """Output of the example, whose trainer is killed in the second of three steps."""
    sizes = ("--prompts", "6", "--generations", "4", "--batch-size", "2", "--compared", "3")
    return run_inside("tests.vllm.rl", *sizes, "--kill-at", "2")


def test_images_are_processed_once_though_the_trainer_is_killed(printed: str) -> None:
    assert "the trainer has ended (-9): another one goes on" in printed
    assert re.findall(r"^step (\d)", printed, re.M) == ["1", "2", "3"]
    assert "\n6 images were processed\n" in printed


def test_engine_and_trainer_read_the_same_physical_pages(printed: str) -> None:
    mapped = re.findall(r"^mapped by (\w+): (.*)", printed, re.M)
    assert {"program", "engine", "trainer"} <= {role for role, _ in mapped}
    assert len({pages for _, pages in mapped}) == 1


def test_log_probabilities_differ_by_no_more_than_by_value(printed: str) -> None:
    found = dict(re.findall(r"^log-probabilities, features by (\w+): (\S+) at most", printed, re.M))
    assert float(found["reference"]) <= float(found["value"]) < 1e-3
    assert "the trainer's are equal by reference and by value: True" in printed


@pytest.mark.parametrize("block", blocks_of(DOCS / "rl.md", "python"), ids=["page"])
def test_the_program_of_the_page_prints_what_it_shows(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)
