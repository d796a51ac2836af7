"""Deaths of Afferent's and vLLM's processes cause no wrong answer, no hang and no leaked pin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.launch import DAEMON
from afferent.types import ObjectKind
from tests.server import Server, wait_until
from tests.vllm.asking import Answer, ask_all
from tests.vllm.questions import Question, Said, questions
from tests.vllm.servers import (
    SHAPES,
    TOOLS,
    Stock,
    is_ready,
    supervised,
    wait_until_nothing_held,
)

pytestmark = pytest.mark.vllm

SEED = 7
_LONGEST_S = 120.0
_OURS = (DAEMON, "afferent.media.workers.pool", "afferent.proxy.frontend")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    store_path = tmp_path_factory.mktemp("vllm") / "store.sock"
    with supervised(
        "--store-path",
        str(store_path),
        *("--embeddings-share", "0.2", "--frontends", "2"),
        vllm=TOOLS,
    ) as running:
        yield running, store_path


def undisturbed(server: Server, asked: Sequence[Question]) -> list[Said | None]:
    """Ask without faults; retry while a frontend has not yet noticed that vLLM was replaced."""
    found = asyncio.run(ask_all(server.url, asked, again_for_s=60))
    assert all(each.said is not None and each.said.status == 200 for each in found), found
    return [each.said for each in found]


def is_right(answer: Answer, expected: Said | None) -> bool:
    """Return whether the answer is the expected one, an error that permits a retry, or cut off."""
    if answer.broke_off:
        return answer.broke_off != "hangs"
    if answer.is_complete:
        return answer.said == expected
    return answer.said is not None and answer.said.status in (200, 500, 502, 503)


def vllm_processes(server: Server) -> dict[str, psutil.Process]:
    """Find the API server, the engine core and the worker by their command lines."""
    found = {}
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if "vllm.entrypoints" in line and "serve" in line and "afferent" not in line[:40]:
                found["api"] = process
            for name in ("EngineCore", "Worker"):
                if f"VLLM::{name}" in line:
                    found[name] = process
    return found


def test_deaths_of_both_halves(ours: tuple[Server, Path]) -> None:
    """Any process may die: clients that retry get the right answer in time, never a wrong one."""
    server, store_path = ours
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    asked = [
        Question(each.path, each.body, each.is_stream)
        for each in questions(48, SEED, "shapes")
        # vLLM splits an incomplete tool call differently if tokens arrive in pairs.
        if not (each.is_stream and "tools" in each.body)
    ]
    expected = undisturbed(server, asked)
    right = dict(zip(map(id, asked), expected, strict=True))
    num_vllm, num_ours, every = 0, 0, list[tuple[Question, Answer]]()
    late = 0
    for victim in ("api", "EngineCore", "Worker") * 4:

        async def storm(victim: str = victim) -> list[Answer]:
            nonlocal num_vllm, num_ours
            asking = asyncio.ensure_future(
                ask_all(server.url, asked, again_for_s=_LONGEST_S, every=every)
            )
            for _ in range(6):
                await asyncio.sleep(rng.uniform(0.05, 0.5))
                num_ours += await _kill(lambda: server.find(rng.choice(_OURS))[:1])
            num_vllm += await _kill(lambda: [vllm_processes(server)[victim]])
            return await asking

        late += sum(not answer.is_complete for answer in asyncio.run(storm()))
        wait_until(lambda: is_ready(server), timeout_s=300)
    wrong = [(q.path, a, right[id(q)]) for q, a in every if not is_right(a, right[id(q)])]
    complete = sum(answer.is_complete for _, answer in every)
    slowest = max(answer.seconds for _, answer in every)
    print(
        f"{num_vllm} deaths of vLLM's processes, {num_ours} of ours; {complete} right, "
        f"{len(every) - complete} asked again, {late} too late, {len(wrong)} wrong; "
        f"the slowest answer {slowest:.1f} s"
    )
    for each in wrong[:5]:
        print(each)
    assert not wrong
    assert late == 0
    assert slowest < _LONGEST_S
    assert num_vllm >= 12
    assert num_ours >= 60
    assert undisturbed(server, asked) == expected
    wait_until_nothing_held(store_path)


async def _kill(find: Callable[[], list[psutil.Process]]) -> int:
    """Kill one process as soon as it exists."""
    for _ in range(600):
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            for process in find():
                process.kill()
                return 1
        await asyncio.sleep(0.05)
    return 0


@pytest.mark.parametrize("victim", ["EngineCore", "api"])
def test_a_vllm_that_freezes_is_named_and_replaced(ours: tuple[Server, Path], victim: str) -> None:
    """A hanging engine core is noticed, too, although its API server still reports health."""
    server, _ = ours
    wait_until(lambda: is_ready(server), timeout_s=300)
    frozen = vllm_processes(server)[victim]
    start_s = time.monotonic()
    frozen.suspend()
    wait_until(lambda: server.get("/ready").json()["frozen"] == ["vllm-server"], timeout_s=5)
    seen_s = time.monotonic() - start_s
    wait_until(lambda: not frozen.is_running())
    print(f"{victim}: seen after {seen_s:.1f} s, gone after {time.monotonic() - start_s:.1f} s")
    wait_until(lambda: is_ready(server), timeout_s=300)


def test_embeddings_are_found_again(ours: tuple[Server, Path]) -> None:
    """After a restart of vLLM, no item is encoded again, and the answers are the same."""
    server, store_path = ours
    asked = [Question(each.path, each.body, each.is_stream) for each in questions(12, 99, "shapes")]
    expected = undisturbed(server, asked)
    before = _num_embeddings(store_path)
    assert before > 0
    vllm_processes(server)["api"].kill()
    wait_until(lambda: not is_ready(server))
    wait_until(lambda: is_ready(server), timeout_s=300)
    hits = _num_hits(store_path)
    assert undisturbed(server, asked) == expected
    assert _num_embeddings(store_path) == before
    assert _num_hits(store_path) > hits


def test_two_vllms_share_a_store(tmp_path: Path) -> None:
    """Each item is preprocessed once and encoded once for both servers."""
    store_path = tmp_path / "store.sock"
    sockets = [tmp_path / "a.sock", tmp_path / "b.sock"]
    env = {"AFFERENT_STORE_PATH": str(store_path)}
    arguments = ("--served-model-name", "shapes", *TOOLS)
    asked = [Question(each.path, each.body, each.is_stream) for each in questions(12, 8, "shapes")]
    urls = [f"unix:{each}" for each in sockets]
    front = [*("--engine", "vllm", "--engine-url", ",".join(urls))]
    front += ["--store-path", str(store_path), "--embeddings-share", "0.3"]
    with contextlib.ExitStack() as stack:
        for uds in sockets:
            stack.enter_context(Stock(SHAPES, *arguments, uds=uds, **env))
        server = stack.enter_context(Server(*front))
        wait_until(lambda: is_ready(server))
        expected = undisturbed(server, asked)
        time.sleep(3)  # counters are sent once a second
        encoded = _items(server, "encoded")
        num_items = _num_embeddings(store_path)
        # Ask twice as many: the server that has seen an item is too busy, so both work.
        again = asyncio.run(ask_all(server.url, [*asked, *asked], num_at_once=24))
        assert [each.said for each in again] == [*expected, *expected]
        time.sleep(3)
        print({word: _items(server, word) for word in ("encoded", "found", "lost")})
        assert encoded >= num_items == _num_embeddings(store_path) > 0
        assert _items(server, "encoded") == encoded, "nothing was encoded again"
        made = server.metrics()['afferent_items_total{modality="image",outcome="made"}']
        assert made == num_items


def _items(server: Server, outcome: str) -> float:
    return server.metrics().get(f'afferent_vllm_items_total{{outcome="{outcome}"}}', 0.0)


def test_attached_it_comes_back_when_vllm_does(tmp_path: Path) -> None:
    """Other programs start and restart vLLM and the server, in any order."""
    store_path, uds = tmp_path / "store.sock", tmp_path / "vllm.sock"
    env = {"AFFERENT_STORE_PATH": str(store_path)}
    asked = [Question(each.path, each.body, each.is_stream) for each in questions(6, 5, "shapes")]
    arguments = ["--served-model-name", "shapes", *TOOLS]
    front = [
        *("--engine", "vllm", "--engine-url", f"unix:{uds}"),
        *("--store-path", str(store_path)),
    ]
    with Stock(SHAPES, *arguments, uds=uds, **env) as vllm, Server(*front) as server:
        expected = undisturbed(server, asked)
        os.killpg(vllm.popen.pid, signal.SIGKILL)
        uds.unlink()  # else the next vLLM can't listen there
        wait_until(lambda: not is_ready(server))
        assert server.post(asked[0].body).status_code == 503
        with Stock(SHAPES, *arguments, uds=uds, **env):
            wait_until(lambda: is_ready(server), timeout_s=300)
            assert undisturbed(server, asked) == expected
            server.__exit__(None, None, None)
            with Server(*front) as again:  # with another secret and another arena
                assert undisturbed(again, asked) == expected


def test_the_plugin_alone_changes_nothing() -> None:
    """Without the address of a store, the plugin leaves vLLM as it is."""
    asked = [Question(each.path, each.body, each.is_stream) for each in questions(6, 5, "shapes")]
    arguments = ("--served-model-name", "shapes", *TOOLS)
    with Stock(SHAPES, *arguments) as with_plugin:
        one = asyncio.run(ask_all(with_plugin.url, asked))
    with Stock(SHAPES, *arguments, VLLM_PLUGINS="none") as without:
        other = asyncio.run(ask_all(without.url, asked))
    assert [each.said for each in one] == [each.said for each in other]
    assert all(each.said is not None and each.said.status == 200 for each in one)


def _num_embeddings(store_path: Path) -> int:
    with DaemonStore(str(store_path), name="looker") as store:
        return store.stat().kinds[ObjectKind.EMBEDDINGS].num_objects


def _num_hits(store_path: Path) -> int:
    with DaemonStore(str(store_path), name="looker") as store:
        return store.stat().num_hits
