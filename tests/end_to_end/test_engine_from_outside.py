"""An engine of another installed package, chosen by name: `examples.tiny_plugin`."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from afferent.conformance.engine import CHECKS, check
from afferent.conformance.engine_trial import Part, Question
from afferent.engines import registry
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Modality, Placeholder
from examples import tiny_engine, tiny_plugin
from tests.end_to_end.conformance import running
from tests.server import Server, ask, data_url, wait_until

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer.from_file(str(BUILT_IN_MODELS / "shapes" / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose path has the engine's package, with the metadata that pip writes."""
    folder = tmp_path_factory.mktemp("site-packages")
    about = folder / "tiny_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.0\n")
    entry = f"[{registry.GROUP}]\ntiny = {tiny_plugin.MODULE}:Tiny\n"
    (about / "entry_points.txt").write_text(entry)
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = ["--engine", "tiny", "--tiny-max-model-len", "500", "--frontends", "2"]
    with Server(*arguments, env={"PYTHONPATH": path}) as server:
        yield server


def plain(colour: tuple[int, int, int]) -> str:
    file = io.BytesIO()
    Image.new("RGB", (60, 60), colour).save(file, "PNG")
    return data_url(file.getvalue(), "png")


def colours(*numbers: int) -> list[tuple[int, int, int]]:
    """Return colours whose tokens decode to text."""
    return [(30 + number, 60 - number, 50) for number in numbers]


def text_of(*said: tuple[int, int, int]) -> str:
    return str(TOKENIZER.decode([token for colour in said for token in colour]))


def answer_of(server: Server, *shown: tuple[int, int, int]) -> str:
    answer = server.post(ask([plain(colour) for colour in shown], "Which colours?"))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_it_answers(tiny: Server) -> None:
    first, second = colours(1, 2)
    assert answer_of(tiny, first, second) == text_of(first, second)
    wait_until(lambda: tiny.metric("afferent_arena_pinned_bytes") == 0)


def test_none_of_the_built_in_engine_runs(tiny: Server) -> None:
    assert "tiny: says the mean colour" in tiny.log()
    names = [" ".join(process.cmdline()) for process in tiny.processes()]
    assert any(tiny_plugin.MODULE in name for name in names)
    assert not any("afferent.builtin.engine" in name for name in names)


def test_what_it_can_not_do_is_refused(tiny: Server) -> None:
    refused = tiny.post(ask([plain((1, 2, 3))], "Which colour?", temperature=0.7))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported_parameter")


def test_its_own_limit_of_tokens(tiny: Server) -> None:
    question = ask([plain((1, 2, 3))], "Which colour?", max_tokens=501)  # it has a setting for 500
    assert 0 < int(tiny.post(question).headers["x-afferent-max-tokens"]) < 500


def test_it_is_started_again(tiny: Server) -> None:
    (old,) = tiny.find(tiny_plugin.MODULE)
    old.kill()
    wait_until(lambda: tiny.find(tiny_plugin.MODULE) not in ([], [old]))
    wait_until(lambda: all(tiny.get("/ready").status_code == 200 for _ in range(8)))
    (shown,) = colours(3)
    assert answer_of(tiny, shown) == text_of(shown)


# Conformance


def question(number: int) -> Question:
    shown = colours(*(number % 20, 29 - number % 20))
    parts = [
        Part(Modality.IMAGE, tiny_engine.plain_image(colour, 24), placeholder)
        for colour, placeholder in zip(shown, (Placeholder(1, 4), Placeholder(6, 4)), strict=True)
    ]
    return Question([1] * 12, parts, [int(value) for value in np.ravel(shown)])


@pytest.mark.parametrize("name", CHECKS)
def test_it_conforms(tiny: Server, name: str) -> None:
    async def run() -> None:
        async with running(tiny_plugin.Tiny(), tiny, tiny_plugin.MODULE, question) as subject:
            await check(name, subject)

    asyncio.run(run())
