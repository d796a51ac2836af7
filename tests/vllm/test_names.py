"""Names of items in vLLM's caches: of the content alone, and never of what lost features became."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq

from afferent.conformance.images import draw_image
from afferent.errors import AfferentError, StoreFull
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.launch import DAEMON
from afferent.types import ObjectKind
from tests.server import Server, data_url, wait_until
from tests.vllm.asking import ask_all
from tests.vllm.questions import questions as make_questions
from tests.vllm.servers import SHAPES, TOOLS, Stock, is_ready, supervised
from tests.vllm.test_lifecycle import vllm_processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

INSERTED = Path(__file__).parent / "inserted"
PICTURES = [draw_image(np.random.default_rng(number)) for number in range(12)]
_NEXT = iter(range(len(PICTURES)))
BLOCK = 128
"""Tokens of a block of the prefix cache, on a CPU."""
TEXT = "What is in the picture? " * 40
"""The prompt has more than one block of the prefix cache."""


def body(*urls: str, **more: Any) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": TEXT})
    message = {"role": "user", "content": parts}
    return {"model": "shapes", "messages": [message], "max_tokens": 8, "temperature": 0, **more}


def with_embeddings() -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(torch.zeros(4, 64), buffer)
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(buffer.getvalue()).decode()}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What?"}]}
    return {**body(), "messages": [message]}


def asked(
    url: str, asked_body: dict[str, Any], path: str = "/v1/chat/completions"
) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=asked_body, timeout=300)


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def hits(url: str, cache: str = "prefix_cache") -> float:
    """Return the number of tokens that vLLM has found in its prefix cache, or in another one."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    return float(re.findall(rf"(?m)^vllm:{cache}_hits_total\{{.*\}} (\S+)$", page)[0])


@dataclass(slots=True)
class Held:
    """A server whose vLLM can be stopped at two points."""

    server: Server
    folder: Path

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def store_path(self) -> Path:
        return self.folder / "store.sock"

    def hits(self) -> float:
        return hits(self.url)

    def picture(self) -> str:
        """Return a picture that no test has shown before."""
        return data_url(PICTURES[next(_NEXT)])

    def engine(self) -> int:
        return vllm_processes(self.server)["EngineCore"].pid

    @contextlib.contextmanager
    def asking(self, point: str, asked_body: dict[str, Any]) -> Iterator[Future[httpx.Response]]:
        """Ask, and yield once vLLM is stopped at a point; it goes on afterwards."""
        hold = self.folder / f"hold-{point}"
        (self.folder / f"held-{point}").unlink(missing_ok=True)
        hold.touch()
        pool = ThreadPoolExecutor(1)
        try:
            future = pool.submit(asked, self.url, asked_body)
            wait_until(lambda: (self.folder / f"held-{point}").exists())
            yield future
        finally:
            hold.unlink()
            pool.shutdown(wait=False)

    def kill_daemon(self) -> None:
        (daemon,) = self.server.find(DAEMON)
        daemon.kill()
        daemon.wait(30)

    def lose_features(self) -> None:
        """Delete all features, and write over all memory that is free."""
        with DaemonStore(str(self.store_path), name="thief", writable=True) as store:
            infos = store.list_objects(ObjectKind.FEATURES, limit=1000)
            store.delete([info.key for info in infos if info.key])
            with contextlib.suppress(StoreFull):
                while True:
                    store.put("others", {"x": np.full(1 << 20, 0xDD, np.uint8)})

    def wait_ready(self) -> None:
        wait_until(lambda: is_ready(self.server), timeout_s=300)


@pytest.fixture(scope="module")
def stock() -> Iterator[str]:
    with Stock(SHAPES, "--served-model-name", "shapes", *TOOLS) as running:
        yield running.url


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("names")
    env = {"PYTHONPATH": str(INSERTED), "TEST_HOLDS": str(folder)}
    with supervised("--store-path", str(folder / "store.sock"), vllm=TOOLS, env=env) as server:
        yield Held(server, folder)


def test_prefix_cache_after_eviction_has_as_many_hits_as_stock(held: Held, stock: str) -> None:
    picture = held.picture()
    expected = said(asked(stock, body(picture)))
    before_stock = hits(stock)
    assert said(asked(stock, body(picture))) == expected
    wanted = hits(stock) - before_stock
    assert wanted > 0
    assert said(asked(held.url, body(picture))) == expected
    with DaemonStore(str(held.store_path), name="operator") as store:
        wait_until(lambda: store.stat().held_nbytes == 0)
        store.evict(ObjectKind.FEATURES)
        assert store.stat().kinds[ObjectKind.FEATURES].num_objects == 0
    before = held.hits()
    assert said(asked(held.url, body(picture))) == expected
    assert held.hits() - before == wanted


@pytest.mark.parametrize("loss", ["lose_features", "kill_daemon"])
@pytest.mark.parametrize("stream", [False, True])
def test_features_lost_before_step_fail_that_request_alone(
    held: Held, stock: str, loss: str, stream: bool
) -> None:
    picture, engine = held.picture(), held.engine()
    with held.asking("core", body(picture, stream=stream)) as future:
        getattr(held, loss)()
    answer = future.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_restarted")
    held.wait_ready()
    before = held.hits()
    assert said(asked(held.url, body(picture))) == said(asked(stock, body(picture)))
    assert held.hits() == before, "nothing was computed, so nothing is found"
    assert held.engine() == engine


@pytest.mark.parametrize("loss", ["lose_features", "kill_daemon"])
def test_features_lost_during_step_give_right_cached_result(
    held: Held, stock: str, loss: str
) -> None:
    picture, engine = held.picture(), held.engine()
    with held.asking("worker", body(picture)) as future:
        getattr(held, loss)()
    assert future.result().status_code == 503, "the frontend has lost its pins"
    held.wait_ready()
    before = held.hits()
    assert said(asked(held.url, body(picture))) == said(asked(stock, body(picture)))
    assert held.hits() > before, "the result of the step is right, and is found"
    assert held.engine() == engine


def test_stopped_daemon_delays_no_text_request(held: Held, stock: str) -> None:
    picture, text = held.picture(), body(max_tokens=1)
    (daemon,) = held.server.find(DAEMON)
    expected = said(asked(stock, text))
    with held.asking("core", body(picture)) as future:
        daemon.suspend()
    try:
        # Straight to vLLM: Afferent's own frontend waits for the store.
        assert said(_past_the_frontend(held, text)) == expected
        assert not future.done()
    finally:
        daemon.resume()
    held.wait_ready()
    assert said(asked(held.url, body(picture))) == said(asked(stock, body(picture)))


def _past_the_frontend(held: Held, asked_body: dict[str, Any]) -> httpx.Response:
    command = vllm_processes(held.server)["api"].cmdline()
    path = command[command.index("--uds") + 1]
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=60) as client:
        return client.post("http://vllm/v1/chat/completions", json=asked_body)


def test_embeddings_of_clients_are_refused_as_by_stock(held: Held, stock: str) -> None:
    """vLLM allows embeddings where a connector brings them; this connector does not."""
    answers = [asked(url, with_embeddings()) for url in (stock, held.url)]
    assert [answer.status_code for answer in answers] == [400, 400], answers[1].text


def test_item_that_ends_engine_is_refused_afterwards(held: Held, stock: str) -> None:
    bad, good = held.picture(), held.picture()
    engine = held.engine()
    (held.folder / "break-encoder").touch()
    try:
        answer = asked(held.url, body(bad))
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: not psutil.pid_exists(engine), timeout_s=60)
    finally:
        (held.folder / "break-encoder").unlink()
    held.wait_ready()
    engine = held.engine()
    answer = asked(held.url, body(bad))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "media_not_encodable")
    answer = asked(held.url, body(bad, stream=True))
    assert '"media_not_encodable"' in answer.text  # perhaps after a first event
    assert "Internal server error" not in answer.text
    assert said(asked(held.url, body(good))) == said(asked(stock, body(good)))
    assert held.engine() == engine


def _sharing(folder: Path, role: str = "kv_both") -> tuple[str, ...]:
    """Return the arguments of a vLLM that shares its KV blocks through a folder."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return (*TOOLS, "--kv-transfer-config", json.dumps(config))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two servers, whose vLLMs exchange KV blocks through a folder."""
    folder = tmp_path_factory.mktemp("kv")
    shared = _sharing(folder)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                supervised("--store-path", str(folder / f"{number}.sock"), vllm=shared)
            )
            for number in range(2)
        ]
        for number, server in enumerate(servers):
            _STORES[server.url] = str(folder / f"{number}.sock")
        yield servers[0], servers[1]


_STORES: dict[str, str] = {}


def _store_of(server: Server) -> str:
    return _STORES[server.url]


def external_hits(url: str) -> float:
    """Return the number of tokens that vLLM has found through its KV connector."""
    return hits(url, "external_prefix_cache")


def test_kv_connector_finds_at_one_server_what_another_has_computed(
    two: tuple[Server, Server], stock: str
) -> None:
    one, other = (server.url for server in two)
    asked_body = body(data_url(draw_image(np.random.default_rng(100))))
    expected = said(asked(stock, asked_body))
    assert said(asked(one, asked_body)) == expected
    assert external_hits(other) == 0
    assert said(asked(other, asked_body)) == expected
    assert external_hits(other) > 0


def test_prefill_on_one_server_and_decode_on_another(tmp_path: Path, stock: str) -> None:
    """As routers do it: the first server computes one token, and the second one the answer."""
    questions = [each for each in make_questions(24, 7, "shapes") if each.aborts is None]
    parameters = {"kv_transfer_params": {"do_remote_decode": True}}
    with (
        supervised(
            *("--store-path", str(tmp_path / "1.sock")), vllm=_sharing(tmp_path, "kv_producer")
        ) as prefill,
        supervised(
            *("--store-path", str(tmp_path / "2.sock")), vllm=_sharing(tmp_path, "kv_consumer")
        ) as decode,
    ):
        expected = asyncio.run(ask_all(stock, questions))
        for question, answer in zip(questions, expected, strict=True):
            most = "max_output_tokens" if question.path == "/v1/responses" else "max_tokens"
            first = {**question.body, most: 1, "stream": False}
            first.pop("stream_options", None)
            if question.path == "/v1/chat/completions":
                first |= parameters
            assert asked(prefill.url, first, question.path).status_code == 200
            (found,) = asyncio.run(ask_all(decode.url, [question]))
            assert found.said == answer.said, question.path
        prompts = [number for each in expected if each.said for number in each.said.prompt_tokens]
        assert external_hits(decode.url) == sum((n - 1) // BLOCK * BLOCK for n in prompts) > 0


def test_kv_of_a_stock_vllm_is_found_under_its_own_hash(tmp_path: Path) -> None:
    """A server with ``--engine-hashes`` and a vLLM without Afferent share blocks, both ways."""
    shared = _sharing(tmp_path)
    own, stocks, other = (data_url(draw_image(np.random.default_rng(n))) for n in (200, 201, 202))
    front = ("--store-path", str(tmp_path / "store.sock"), "--engine-hashes", "vllm-blake3")
    with (
        Stock(SHAPES, "--served-model-name", "shapes", *shared) as stock,
        supervised(*front, vllm=shared) as server,
    ):
        expected = said(asked(stock.url, body(stocks)))
        before = external_hits(server.url)
        assert said(asked(server.url, body(stocks))) == expected
        assert external_hits(server.url) > before
        expected = said(asked(server.url, body(own)))
        before = external_hits(stock.url)
        assert said(asked(stock.url, body(own))) == expected
        assert external_hits(stock.url) > before
        before = external_hits(server.url)
        assert said(asked(server.url, body(other))) == said(asked(stock.url, body(other)))
        assert external_hits(server.url) == before


def test_embeddings_beside_a_kv_connector_are_refused(two: tuple[Server, Server]) -> None:
    """vLLM takes them there; this server's limits do not cover them."""
    answer = asked(two[0].url, with_embeddings())
    assert answer.status_code == 400, answer.text
    assert "no embeddings" in answer.text


def test_engine_with_an_ec_connector_of_its_own_names_blocks(tmp_path: Path, stock: str) -> None:
    """Afferent's connector then is not there, and an item has another name in another block."""
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"shared_storage_path": str(tmp_path / "outputs")},
    }
    picture, store_path = data_url(PICTURES[next(_NEXT)]), tmp_path / "store.sock"
    expected = said(asked(stock, body(picture)))
    own = (*TOOLS, "--ec-transfer-config", json.dumps(config))
    with supervised("--store-path", str(store_path), vllm=own) as server:
        found = [hits(server.url)]
        for is_evicted in (False, False, True):
            if is_evicted:
                with DaemonStore(str(store_path), name="operator") as store:
                    wait_until(lambda store=store: store.stat().held_nbytes == 0)  # type: ignore[misc]
                    store.evict(ObjectKind.FEATURES)
            assert said(asked(server.url, body(picture))) == expected
            found.append(hits(server.url))
        answer = asked(server.url, with_embeddings())
        assert (answer.status_code, "no embeddings" in answer.text) == (400, True), answer.text
    assert [after > before for before, after in itertools.pairwise(found)] == [False, True, False]


def _block_keys(events: zmq.Socket[bytes]) -> list[Any]:
    """Return the extra keys of all blocks that vLLM has reported since the last call."""
    found: list[Any] = []
    while events.poll(2000):
        _, _, payload = events.recv_multipart()
        _, batch, *_ = msgspec.msgpack.decode(payload)
        for event in batch:
            if event["type"] == "BlockStored":
                found += event["extra_keys"] or []
    return found


def test_prefix_cache_after_restarts_has_as_many_hits(tmp_path: Path) -> None:
    """The repeat has the tokens and the keys of blocks that it had before."""
    store_path, uds, published = (tmp_path / name for name in ("s.sock", "v.sock", "events"))
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{published}"}
    arguments = ("--served-model-name", "shapes", *TOOLS, "--kv-events-config", json.dumps(config))
    front = ("--engine", "vllm", "--engine-url", f"unix:{uds}", "--store-path", str(store_path))
    picture = data_url(PICTURES[next(_NEXT)])
    name = ""
    with contextlib.ExitStack() as stack:
        vllm = Stock(SHAPES, *arguments, uds=uds, AFFERENT_STORE_PATH=str(store_path))
        stack.enter_context(vllm)
        events = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.SUB))
        events.connect(f"ipc://{published}")
        events.subscribe(b"")
        found, texts = [0.0], []
        for restart in (None, None, "features", "daemon", "server"):
            with Server(*front) as server:
                wait_until(lambda server=server: is_ready(server), timeout_s=120)  # type: ignore[misc]
                if restart == "daemon":
                    (daemon,) = server.find(DAEMON)
                    daemon.kill()
                    wait_until(lambda server=server: is_ready(server), timeout_s=120)  # type: ignore[misc]
                texts.append(said(asked(server.url, body(picture))))
                found.append(hits(server.url))
                if restart is None:  # ask once more in the same server
                    with DaemonStore(str(store_path), name="operator") as store:
                        wait_until(lambda store=store: store.stat().held_nbytes == 0)  # type: ignore[misc]
                        store.evict(ObjectKind.FEATURES)
                    texts.append(said(asked(server.url, body(picture))))
                    found.append(hits(server.url))
            keys = {str(key) for keys in _block_keys(events) for key in keys or ()}
            names = set(re.findall(r"[0-9a-f]{64}", " ".join(keys)))
            if not name:
                (name,) = names
            assert names <= {name}
    with Server(str(SHAPES), command="render") as renderer:
        rendered = renderer.post_to("/v1/chat/completions/render", body(picture)).json()
    assert rendered["features"]["mm_hashes"]["image"] == [name], "a router knows the name too"
    added = [after - before for before, after in itertools.pairwise(found)]
    print(f"tokens found: {added}; blocks of the item {name}")
    assert added[0] == 0
    assert added[1] > 0
    assert set(added[1:]) == {added[1]}
    assert len(set(texts)) == 1


NUM_FAULTS = 200


def test_faults_at_two_servers_give_no_wrong_answer(
    two: tuple[Server, Server], stock: str, tmp_path: Path
) -> None:
    """Each answer that a client accepts is right; so is each result that a server found by name.
    Nothing hangs, and each error is one that clients retry.
    """
    seed = 17
    print(f"seed {seed}")
    rng = random.Random(seed)
    pictures = [data_url(draw_image(np.random.default_rng(1000 + number))) for number in range(24)]
    expected = {picture: said(asked(stock, body(picture))) for picture in pictures}
    counts, wrong, final = Counter[str](), list[tuple[str, str]](), list[str]()
    stop = threading.Event()

    def client(number: int) -> None:
        mine = random.Random(f"{seed} {number}")
        while not stop.is_set():
            picture, server = mine.choice(pictures), mine.choice(two)
            try:
                answer = asked(server.url, body(picture))
            except httpx.HTTPError as error:
                counts[type(error).__name__] += 1
                continue
            counts[str(answer.status_code)] += 1
            if answer.status_code == 200:
                if said(answer) != expected[picture]:
                    wrong.append((picture[-20:], said(answer)))
            elif not _is_retried(answer):
                final.append(answer.text)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        num_faults = 0
        while num_faults < NUM_FAULTS:
            server = rng.choice(two)
            what = rng.choice(("daemon", "daemon", "delete", "delete", "delete", "worker", "stop"))
            if what == "worker" and num_faults % 20:
                what = "daemon"  # vLLM's start takes half a minute
            happened = _strike(what, server, rng)
            counts[happened] += 1
            num_faults += happened != "nothing"
            time.sleep(rng.uniform(0.0, 1.0))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for server in two:
        wait_until(lambda server=server: is_ready(server), timeout_s=300)  # type: ignore[misc]
    for server in two:  # what is found by name now
        for picture in pictures:
            if (text := said(asked(server.url, body(picture)))) != expected[picture]:
                wrong.append((picture[-20:], text))
    print(dict(counts), [external_hits(server.url) for server in two])
    assert not wrong
    assert not final, final[:5]
    assert not {name for name in counts if "Timeout" in name}
    assert counts["200"] > NUM_FAULTS


def _is_retried(answer: httpx.Response) -> bool:
    """Whether the official clients retry a request with this answer by themselves."""
    return answer.status_code in (408, 409, 429) or answer.status_code >= 500


def _strike(what: str, server: Server, rng: random.Random) -> str:
    """Let a fault strike a server; return its name, or ``nothing`` if its victim is not there."""
    with contextlib.suppress(psutil.NoSuchProcess, KeyError, IndexError, AfferentError, ValueError):
        match what:
            case "daemon":
                server.find(DAEMON)[0].kill()
            case "delete":
                with DaemonStore(_store_of(server), name="thief", timeout_s=2.0) as store:
                    infos = store.list_objects(ObjectKind.FEATURES, limit=1000)
                    store.delete([info.key for info in infos if info.key])
            case "worker":
                vllm_processes(server)[rng.choice(("EngineCore", "Worker"))].kill()
            case "stop":
                (daemon,) = server.find(DAEMON)
                daemon.suspend()
                time.sleep(rng.uniform(0.0, 3.0))
                daemon.resume()
        return what
    return "nothing"
