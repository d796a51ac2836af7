"""The documentation's examples run, and print what the pages say.

A ``python`` block is run as a reader would run it: as a file of its own. A block that contains the
server's address is run with a server, in this process, which has imported the large client
libraries already. It prints the ``text`` block below it. Blocks that belong together are run by a
test of `TOGETHER`. Any other block has ``<!-- fragment: why -->`` in the line above.
"""

from __future__ import annotations

import gc
import inspect
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from afferent.engines import protocol
from afferent.media.decoded import DecodedImage
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import describe
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.schedule.encoder_cache import EncoderCache
from afferent.schedule.step import Chunk, EncoderInput, Step
from afferent.schedule.window import WindowIndex
from afferent.store.block import codec
from afferent.store.client.local_store import LocalStore
from afferent.store.daemon.server import StoreServer
from afferent.types import ContentKey, MiB, ObjectKind, Placeholder
from tests.models import make_features
from tests.pages import (
    DOCS,
    PAGES,
    ROOT,
    SHELLS,
    URL,
    WORD_FOR_WORD,
    Block,
    blocks_of,
    commands_of,
    name_of,
)
from tests.server import Server

TOGETHER = {
    "docs/adding-a-family.md": "tests/media/test_families.py",
    "docs/api.md": "test_the_apis_example",
    "docs/format.md": "test_the_formats_example_runs",
    "docs/metrics.md": "test_a_metric_of_your_own_is_shown",
    "docs/offline-vllm.md": "tests/vllm/test_offline.py",
    "docs/ray.md": "tests/ray/test_ray.py",
    "docs/rl.md": "tests/vllm/test_rl.py",
    "docs/scheduling.md": "test_the_guide_to_scheduling_runs",
    "docs/store.md": "test_the_guide_to_the_store_runs",
    "docs/writing-an-engine.md": "test_the_protocol_of_the_guide_is_the_protocol",
}
"""Pages whose Python blocks are run by a test of their own."""


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page, "python") if not block.is_fragment]


ALONE = [
    block
    for page in PAGES
    if name_of(page) not in TOGETHER
    for block in python_blocks(page)
    if URL not in block.text
]
WITH_SERVER = [
    block
    for page in PAGES
    if name_of(page) not in TOGETHER
    for block in python_blocks(page)
    if URL in block.text
]


RunHere = Callable[[Block, str], None]


def name_of_block(block: Block) -> str:
    return f"{name_of(block.page)}-{python_blocks(block.page).index(block)}"


@pytest.mark.parametrize("block", ALONE, ids=name_of_block)
def test_the_examples_run(block: Block, tmp_path: Path) -> None:
    run_as_a_file(block, block.text, tmp_path)


@pytest.mark.parametrize("block", WITH_SERVER, ids=name_of_block)
def test_the_clients_examples_run(block: Block, server: Server, run_here: RunHere) -> None:
    """The program is unchanged except for the port."""
    run_here(block, block.text.replace(URL, server.url))


def run_as_a_file(block: Block, program: str, folder: Path, *arguments: str) -> None:
    file = folder / "example.py"
    file.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert block.printed is not None, "a block of text behind it says what it prints"
    assert done.stdout == block.printed


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> RunHere:
    """A function that runs a program as `run_as_a_file` does, but in this process.

    A warning is an error in all tests, also while the program's objects are deleted.
    """

    def run(block: Block, program: str) -> None:
        file = tmp_path / "example.py"
        file.write_text(program)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr("sys.argv", [str(file)])
        runpy.run_path(str(file), run_name="__main__")
        gc.collect()
        printed = capfd.readouterr()
        assert printed.err == ""
        assert block.printed is not None, "a block of text behind it says what it prints"
        assert printed.out == block.printed

    return run


def test_a_program_is_told_where_the_store_is(tmp_path: Path) -> None:
    """In the example of two terminals, the second program finds the first one's object."""
    (block,) = [b for b in blocks_of(DOCS / "library.md", "python") if "sys.argv[1]" in b.text]
    with StoreServer(64 * MiB) as server:
        run_as_a_file(block, block.text, tmp_path, server.address)
        again = replace(block, printed="14.0\n")
        run_as_a_file(again, block.text, tmp_path, server.address)


def test_curls_of_the_pages_are_answered(server: Server) -> None:
    for page in PAGES:
        if name_of(page) in WORD_FOR_WORD:
            continue
        for block in blocks_of(page, *SHELLS):
            for command in commands_of(block):
                if command.startswith("curl ") and not block.is_fragment:
                    command = command.replace(URL, server.url).replace("curl", "curl --fail", 1)
                    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, timeout=60)


def test_blocks_that_belong_together_are_run() -> None:
    here = Path(__file__).read_text()
    for page, test in TOGETHER.items():
        assert python_blocks(ROOT / page), f"{page} has no examples any more"
        if test.endswith(".py"):
            assert Path(page).name in (ROOT / test).read_text()
        else:
            assert f"def {test}(" in here


def test_the_guide_to_the_store_runs() -> None:
    """All of its examples run, one after another."""
    shares = {ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.5}
    with LocalStore(4 * MiB, shares=shares) as store:
        pixels, grid = np.ones((4, 8), np.float32), np.array([[1, 2, 2]])
        trees = {ContentKey(bytes([n]) * 32): {"pixel_values": pixels * n} for n in range(3)}
        names = {
            "store": store,
            "core": store,
            "workers": [store],
            "pixels": pixels,
            "grid": grid,
            "trees": trees,
            "sizes": dict.fromkeys(trees, 1000),
            "encode": lambda tree: tree["pixel_values"] * 2,
            "digest_of_the_encoder": b"digest",
        }
        for block in python_blocks(DOCS / "store.md"):
            exec(block.text, names)  # noqa: S102
        assert store.stat().held_nbytes == 0
        assert store.stat().num_objects == 6


def test_the_formats_example_runs() -> None:
    tree = {"grid": np.array([1, 26, 46]), "n": 7}
    names: dict[str, Any] = {"tree": tree, "block": memoryview(bytearray(88))}
    (block,) = python_blocks(DOCS / "format.md")
    exec(block.text, names)  # noqa: S102
    assert names["nbytes"] == 88
    assert (codec.view(names["block"])["grid"] == tree["grid"]).all()


def test_a_metric_of_your_own_is_shown(tmp_path: Path) -> None:
    """The example runs in a process of its own, apart from the metrics of this one."""
    (block,) = python_blocks(DOCS / "metrics.md")
    show = "\nfrom afferent.telemetry import exposition\n"
    show += "print(exposition.render([DRAFTS.reading()]).decode(), end='')\n"
    run_as_a_file(block, block.text + show, tmp_path)


class Workers:
    """Fake workers that choose a meaningless token until a step is empty."""

    def do(self, step: Step) -> list[tuple[str, int]]:
        if step.is_empty:
            raise StopIteration
        return [
            *((chunk.sequence_id, 1) for chunk in step.prefill if chunk.samples),
            *((sequence_id, 1) for sequence_id in step.decode),
        ]


def test_the_guide_to_scheduling_runs() -> None:
    loop, window, cache = python_blocks(DOCS / "scheduling.md")
    placeholder = Placeholder(offset=100, length=50)
    names: dict[str, Any] = {"key": b"dog", "placeholder": placeholder, "EOS": 2}
    with pytest.raises(StopIteration):
        exec(loop.text, names | {"workers": Workers()})  # noqa: S102
    item = EncoderInput(b"dog", placeholder)
    names |= {
        "index": WindowIndex([(placeholder, item)]),
        "embeddings": {b"dog": np.arange(50)},
        "chunk": Chunk("a", 120, 40, samples=False),
        "end": 160,
    }
    exec(window.text, names)  # noqa: S102
    assert (names["rows"] == np.arange(20, 50)).all()
    names |= {
        "cache": EncoderCache(capacity_embeds=1000, capacity_nbytes=1 << 30),
        "request_id": "a",
    }
    exec(cache.text, names)  # noqa: S102
    assert names["evicted"] == []


def test_the_protocol_of_the_guide_is_the_protocol() -> None:
    block, _ = python_blocks(DOCS / "writing-an-engine.md")
    names: dict[str, Any] = dict(vars(protocol))
    exec("from __future__ import annotations\n" + block.text, names)  # noqa: S102
    shown, real = signatures(names["Engine"]), signatures(protocol.Engine)
    assert shown == real


def signatures(cls: Any) -> dict[str, str]:
    members = {name: each for name, each in vars(cls).items() if not name.startswith("_")}
    calls = {name: getattr(each, "fget", each) for name, each in members.items()}
    return {
        name: f"{type(members[name]).__name__} {inspect.iscoroutinefunction(call)} "
        f"{inspect.signature(call)}"
        for name, call in calls.items()
    }


def test_the_guide_to_engines_lists_what_can_be_unsupported() -> None:
    text = (DOCS / "writing-an-engine.md").read_text()
    assert all(f"`{name}`" in text for name in get_args(protocol.SamplingField))


def test_features_of_the_arena_are_finished_as_the_guide_to_engines_says() -> None:
    family = describe(BUILT_IN_MODELS / "shapes")
    assert isinstance(family, QwenVlFamily)
    image = DecodedImage(np.full((56, 84, 3), 255, np.uint8))
    plan = family.plan(image.header)
    features = {**make_features(family, image), "prompt": plan.tree["prompt"]}
    _, block = python_blocks(DOCS / "writing-an-engine.md")
    names: dict[str, Any] = {}
    exec(block.text, names)  # noqa: S102
    with LocalStore(4 * MiB) as store:
        inputs = names["encoder_inputs"](store.block(store.put("r", features)), family, "cpu")
        assert inputs["image_grid_thw"].tolist() == features["image_grid_thw"].tolist()
        assert inputs["pixel_values"].shape == (plan.num_embeds * 4, 3 * 2 * 14 * 14)
        assert inputs["pixel_values"].dtype == torch.float32
        assert (inputs["pixel_values"] < 10).all(), "normalized"
        inputs.clear()


def test_the_apis_example(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is the same for a picture that is sent and for its media id alone."""
    block, *_ = python_blocks(DOCS / "api.md")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(block.text.replace(URL, server.url), names)  # noqa: S102
    names["client"].close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("a ")


@pytest.mark.parametrize("number", [1, 2], ids=["forms", "tools"])
def test_the_apis_other_examples(server: Server, run_here: RunHere, number: int) -> None:
    block = python_blocks(DOCS / "api.md")[number]
    run_here(block, block.text.replace(URL, server.url))
