"""Prompts of Afferent's renderer against those of ``vllm launch render``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from tests.server import Server
from tests.vllm.render_requests import HERMES, MISTRAL, PATHS, Request, request, use_template
from tests.vllm.servers import SHAPES, TOOLS, Stock
from tests.vllm.tiny_models import BOTH, IMAGES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SEED = 11
_OWN_FAILURE = "mm_placeholders must be globally non-overlapping and sorted"
"""vLLM's renderer fails so for several images with Gemma 3."""
_TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL}
_WITH_TOOLS = ("qwen2_5_vl-hermes", "qwen3_vl-mistral", "pixtral-mistral", "internvl-hermes")


def rendered(url: str, kind: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the status, and tokens, hashes and placeholders of each prompt, or the error."""
    answer = httpx.post(f"{url}{PATHS[kind]}", json={**body, "mm_payload": "none"}, timeout=120)
    if answer.status_code != 200:
        return answer.status_code, answer.json().get("error", {}).get("message", "")
    found = answer.json()
    prompts = found if isinstance(found, list) else [found]
    features = [each.get("features") or {} for each in prompts]
    return 200, {
        "token_ids": [each["token_ids"] for each in prompts],
        "hashes": [each.get("mm_hashes") or {} for each in features],
        "places": [
            {
                kind: [(each["offset"], each["length"]) for each in places]
                for kind, places in (each.get("mm_placeholders") or {}).items()
            }
            for each in features
        ],
    }


def _shapes(folder: Path) -> None:
    for file in SHAPES.iterdir():
        (folder / file.name).symlink_to(file)


@pytest.fixture(params=["shapes", *IMAGES, *BOTH, *_WITH_TOOLS])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """A model with or without a template for tools, and the URLs of vLLM's renderer and of ours."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    family, _, style = request.param.partition("-")
    make: Callable[[Path], None] = {"shapes": _shapes, **IMAGES, **BOTH}[family]
    make(folder)
    if style:
        use_template(folder, _TEMPLATES[style])
    arguments = ("--served-model-name", "tiny", "--limit-mm-per-prompt", '{"image":16,"video":0}')
    ours = ("--served-model-name", "tiny", "--render-hashes", "vllm-blake3", "--max-images", "16")
    with (
        Stock(folder, *arguments, *TOOLS, command=("launch", "render")) as stock,
        Server(str(folder), *ours, command="render") as server,
    ):
        yield request.param, stock.url, server.url


def test_prompts_are_those_of_vllm(both: tuple[str, str, str]) -> None:
    name, stock, ours = both
    request_count = int(os.environ.get("TEST_RENDER_REQUESTS", "60"))
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    asked = [request(rng, has_tools="-" in name) for _ in range(request_count)]
    counts, examples = Counter[tuple[str, str]](), dict[str, Any]()

    def compare(each: Request) -> None:
        (their_status, theirs), (our_status, mine) = rendered(stock, *each), rendered(ours, *each)
        if their_status == 400 and _OWN_FAILURE in theirs:
            what = "vLLM fails"
        elif (their_status, our_status) == (400, 400):
            what = "refused by both"
        elif our_status != 200 or their_status != 200:
            what = f"status {their_status} there, {our_status} here"
        else:
            wrong = [part for part in theirs if theirs[part] != mine[part]]
            what = "other " + ", ".join(wrong) if wrong else "equal"
        counts[each[0], what] += 1
        if what not in ("equal", "vLLM fails"):
            examples.setdefault(f"{each[0]}: {what}", (theirs, mine, json.dumps(each[1])[:1500]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, asked))
    print(f"{name}: {dict(sorted(counts.items()))}")
    for what, example in examples.items():
        print(what, str(example)[:3500])
    outcomes = Counter[str]()
    for (_, what), number in counts.items():
        outcomes[what] += number
    assert outcomes.keys() <= {"equal", "refused by both", "vLLM fails"}
    # It can't render two adjacent images of these models.
    assert name in ("gemma3", "gemma3n") or not outcomes["vLLM fails"]
    assert outcomes["refused by both"] <= request_count / 20
