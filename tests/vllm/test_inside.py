"""Checks that run in vLLM's own environment."""

from __future__ import annotations

import json

import pytest

from tests.vllm.servers import python, run_inside
from tools import vllm_env

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "what",
    [
        "fields",
        "many",
        "refusals",
        "hooks",
        "events",
        "names",
        "connector",
        "arrivals",
        "labels",
        "mistral",
        "killed",
    ],
)
def test_in_vllms_environment(what: str) -> None:
    run_inside("tests.vllm.inside", what)


def test_installing_afferent_changes_no_package_of_vllms_environment() -> None:
    changed = python().parents[1] / vllm_env.CHANGED
    assert json.loads(changed.read_text(encoding="utf-8")) == {}
