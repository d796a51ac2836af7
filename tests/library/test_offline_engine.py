"""`afferent.vllm.LLM` with a stand-in for vLLM; `tests/vllm/offline.py` uses the real one."""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from afferent.errors import InvalidMedia
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import MiB
from afferent.vllm import LLM
from tests.images import encoded
from tests.library.full_stores import filled_until_awaited
from tests.server import wait_until

TIMEOUT_S = 20
LARGE = (1000, 800)


class Engine:
    """Engine that ends one request in each step, after ``before_step``."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.num_aborted = 0
        self.before_step: Callable[[], object] = lambda: None
        self._numbers = itertools.count()

    @property
    def llm_engine(self) -> Engine:
        return self

    def enqueue(self, prompts: Sequence[Any], **_: Any) -> list[str]:
        self.waiting += (added := [str(next(self._numbers)) for _ in prompts])
        return added

    def step(self) -> list[Any]:
        self.before_step()
        if not self.waiting:
            return []
        done = types.SimpleNamespace(finish_reason="length")
        return [
            types.SimpleNamespace(finished=True, request_id=self.waiting.pop(0), outputs=[done])
        ]

    def abort_request(self, requests: Sequence[str], *, internal: bool) -> None:
        self.num_aborted += len(requests)
        self.waiting = []


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An LLM whose store has space for a few large images."""
    stand_in: Any = types.ModuleType("vllm")
    stand_in.LLM = lambda *_, **__: Engine()
    sys.modules["vllm"] = stand_in
    try:
        with LLM("shapes", num_workers=1, arena_nbytes=2 * MiB) as made:
            yield made
    finally:
        del sys.modules["vllm"]


@pytest.fixture(autouse=True)
def engine(llm: LLM) -> Engine:
    llm.llm = Engine()
    return llm.llm


def pictures(number: int, size: tuple[int, int] = (64, 64)) -> list[dict[str, Any]]:
    """Return prompts with one new picture each."""
    colours = np.random.default_rng(number).integers(0, 256, (number, 3)).tolist()
    images = [encoded(Image.new("RGB", size, tuple(colour)), "JPEG") for colour in colours]
    return [{"prompt": "What is it?", "multi_modal_data": {"image": image}} for image in images]


def wait_until_nothing_is_held(llm: LLM) -> None:
    with DaemonStore(str(llm._features.address), name="test") as store:
        wait_until(lambda: store.stat().held_nbytes == 0)


class Watched(dict[str, Any]):
    """Prompt that tells when its images are looked for."""

    is_reached = threading.Event()

    def get(self, *arguments: Any) -> Any:
        self.is_reached.set()
        return super().get(*arguments)


def test_the_engine_takes_all_prompts_that_are_ready_before_its_next_step(
    llm: LLM, engine: Engine
) -> None:
    number = 40
    prompts = [*({"prompt": "a"} for _ in range(number - 1)), last := Watched(prompt="a")]
    found = []

    def before_step() -> None:
        assert last.is_reached.wait(TIMEOUT_S)
        found.append(len(engine.waiting))

    engine.before_step = before_step
    assert len(llm.generate(prompts, use_tqdm=False)) == number
    assert found[1] >= number - 2, "all but the first, which has ended, and the last"


def test_more_images_than_the_store_has_space_for_pass_in_order(llm: LLM) -> None:
    prompts = pictures(40, LARGE)
    assert sum(llm._features.plan(LARGE).nbytes for _ in prompts) > 2 * MiB
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [int(output.request_id) for output in outputs] == list(range(40))
    wait_until_nothing_is_held(llm)


def test_images_wait_for_space_that_another_process_releases(llm: LLM) -> None:
    with filled_until_awaited(llm._features.address):
        assert len(llm.generate(pictures(3, LARGE), use_tqdm=False)) == 3
    wait_until_nothing_is_held(llm)


def test_an_error_of_the_engine_unpins_running_and_prepared_images(
    llm: LLM, engine: Engine
) -> None:
    steps = itertools.count()

    def before_step() -> None:
        if next(steps) == 3:
            raise RuntimeError("the engine died")

    engine.before_step = before_step
    with pytest.raises(RuntimeError, match="the engine died"):
        llm.generate(pictures(30), use_tqdm=False)
    assert engine.num_aborted > 0
    wait_until_nothing_is_held(llm)
    engine.before_step = lambda: None
    assert len(llm.generate(pictures(31), use_tqdm=False)) == 31


@pytest.mark.parametrize("where", [0, 5, 9])
def test_an_image_that_cannot_be_used_unpins_all_others(llm: LLM, where: int) -> None:
    prompts = pictures(10)
    prompts[where]["multi_modal_data"] = {"image": b"\xff\xd8\xff no image"}
    with pytest.raises(InvalidMedia):
        llm.generate(prompts, use_tqdm=False)
    wait_until_nothing_is_held(llm)
