"""Popular families: the prompt and the greedy tokens are those of `transformers`.

Each runs in one process; `tests/end_to_end/test_families.py` tests whole servers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import models
from tests.engine import families
from tests.engine.beside_generate import clip, ours, pictures, theirs

FAMILIES: dict[str, Callable[[Path], None]] = {
    "llava": models.make_llava,
    "llava_onevision": families.make_llava_onevision,
    "qwen2_5_vl": functools.partial(families.make_qwen_vl, generation="qwen2_5"),
    "qwen3_vl": functools.partial(families.make_qwen_vl, generation="qwen3"),
    "qwen3_vl_moe": functools.partial(families.make_qwen_vl, generation="qwen3_moe"),
    "gemma3": families.make_gemma3,
    "internvl": families.make_internvl,
    "smolvlm": families.make_smolvlm,
    "pixtral": families.make_pixtral,
    "mistral3": families.make_mistral3,
    "glm4v": families.make_glm4v,
    "glm4v_moe": families.make_glm4v_moe,
    "voxtral": models.make_voxtral,
    "glm_ocr": families.make_glm_ocr,
    "lighton_ocr": families.make_lighton_ocr,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_answer_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    FAMILIES[name](tmp_path)
    media = clip(seed=1) if name == "voxtral" else pictures(seed=2)
    assert ours(tmp_path, media) == theirs(tmp_path, media)
