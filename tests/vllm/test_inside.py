"""Checks that run in vLLM's own environment."""

from __future__ import annotations

import pytest

from tests.vllm.servers import run_inside

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "what",
    ["fields", "many", "refusals", "hooks", "names", "connector", "labels", "mistral", "killed"],
)
def test_in_vllms_environment(what: str) -> None:
    run_inside("tests.vllm.inside", what)
