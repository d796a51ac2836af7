"""Beginnings of a prompt reach the engine while other pages are rendered."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from afferent.builtin.pipeline import prompt_ahead
from afferent.builtin.pipeline.document_pages import beginning, with_pages
from afferent.builtin.pipeline.prompt_ahead import Computed, PromptAhead
from afferent.builtin.pipeline.request import GenerateRequest, Message, TextPart
from afferent.engines.protocol import (
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Tokens,
)
from afferent.errors import EngineUnavailable
from afferent.items import receive
from afferent.items.document_files import OpenedDocument
from afferent.items.documents import Page, ReadDocument, _Beginning, _Page
from afferent.items.request import DocumentPart, MediaPart, SeenMedia
from afferent.items.stage import ITEMS
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Modality
from tests import pdfs
from tests.builtin.frontends import ScriptedEngine, frontend, post
from tests.images import encoded
from tests.server import data_url, image_part, wait_until

NUM_PAGES = 24


class KeepingEngine(ScriptedEngine):
    """Engine that keeps prompts, and records what it computed anew of each."""

    info = EngineInfo(100_000, [2], num_kept_tokens=100_000)

    def __init__(self, *, keeps: bool = True) -> None:
        """Create it.

        Args:
            keeps: Whether it keeps them as it says.
        """
        super().__init__([73])
        self._keeps = keeps
        self.num_new: list[int] = []

    @property
    def ahead(self) -> list[EngineRequest]:
        return [each for each in self.requests if "-ahead-" in each.request_id]

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        most = len(request.token_ids) - 1
        known = max((_num_common(request, each) for each in self.requests), default=0)
        num_cached = min(most, known) if self._keeps else 0
        self.num_new.append(len(request.token_ids) - num_cached)
        async for event in super().submit(request):
            if isinstance(event, Tokens | Finished):
                event, num_cached = structs.replace(event, num_cached=num_cached), 0
            yield event


def _num_common(one: EngineRequest, other: EngineRequest) -> int:
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    number = next((n for n, (a, b) in enumerate(pairs) if a != b), -1)
    number = number if number >= 0 else min(len(one.token_ids), len(other.token_ids))
    for a, b in zip(one.items, other.items, strict=False):
        if a.key != b.key:
            number = min(number, a.placeholder.offset)
    return number


@pytest.fixture
def body(rng: np.random.Generator) -> dict[str, Any]:
    """A request about a document of different pages."""
    shades = rng.integers(0, 256, (NUM_PAGES, 3))
    images = [Image.new("RGB", (100, 80), tuple(map(int, shade))) for shade in shades]
    url = "data:application/pdf;base64," + base64.b64encode(pdfs.of_images(images)).decode()
    content = [
        {"type": "text", "text": "Read this:"},
        {"type": "file", "file": {"file_data": url, "filename": "a.pdf"}},
        {"type": "text", "text": "What is on the last page?"},
    ]
    return {"model": "shapes", "messages": [{"role": "user", "content": content}]}


def ask(address: str, engine: ScriptedEngine, *bodies: dict[str, Any], **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with frontend(address, engine=engine, **options) as http:
            answers = [await post(http, body) for body in bodies]
            await check_released(address, engine)
            return answers

    return asyncio.run(main())


async def check_released(address: str, engine: ScriptedEngine) -> None:
    """Wait until nothing runs, and nothing is pinned; the frontend still runs."""

    def wait() -> None:
        with DaemonStore(address, name="looker") as store:
            wait_until(lambda: engine.num_running == 0)
            wait_until(lambda: all(not info.pins for info in store.list_objects()))

    await asyncio.to_thread(wait)


def test_engine_computes_each_token_once(
    address: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_ahead, "_LEAST_WAIT_S", 60.0)
    engine, hits = KeepingEngine(), ITEMS.labels(Modality.IMAGE, "hit").values[0]
    body["messages"].insert(0, {"role": "system", "content": []})
    first, again = (answer.json() for answer in ask(address, engine, body, body))
    assert ITEMS.labels(Modality.IMAGE, "hit").values[0] - hits == NUM_PAGES, "in the repeat"
    asked = engine.requests[-1]
    assert first["choices"][0]["message"]["content"] == "a"
    assert 1 <= len(engine.ahead) <= NUM_PAGES // 4
    for request in engine.ahead:
        end = len(request.token_ids)
        assert request.token_ids == asked.token_ids[:end]
        assert [item.key for item in request.items] == [
            item.key for item in asked.items if item.placeholder.offset < end
        ]
        assert len(request.items) < NUM_PAGES, "with all pages, the request itself comes"
        assert request.sampling.max_tokens == 1
    *_, whole, repeated = engine.num_new
    assert sum(engine.num_new) - repeated == len(asked.token_ids) == first["usage"]["prompt_tokens"]
    assert whole < len(asked.token_ids), "a part of it was computed ahead"
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again)]
    assert cached == [0, len(asked.token_ids) - 1], "of this request, nothing was cached"


def test_beginning_never_gets_the_last_page() -> None:
    """The documents that a reader has told of are not changed any more when all pages exist."""
    opened = OpenedDocument(DocumentPart("a.pdf"), b"digest", None)
    pages = [_Page(opened, number, None, True, (b"%d" % number,), "auto") for number in range(1, 5)]
    told: list[list[int]] = []
    documents: list[Sequence[ReadDocument]] = []

    def begun(known: Sequence[ReadDocument]) -> None:
        documents.append(known)
        told.append([page.number for document in known for page in document.pages])

    reader = _Beginning([opened], pages, begun)
    for page in (pages[0], pages[2], pages[1], pages[3]):
        reader.add({page: Page(page.number, None, "text")})
    assert told == [[1], [1], [1, 2, 3]]
    assert [page.number for document in documents[-1] for page in document.pages] == [1, 2, 3]


def test_engine_that_drops_its_prompts_gets_two_beginnings(
    address: str, body: dict[str, Any]
) -> None:
    engine = KeepingEngine(keeps=False)
    (answer,) = ask(address, engine, body)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 1 <= len(engine.ahead) <= 2


def test_engine_that_keeps_no_prompts_gets_none(address: str, body: dict[str, Any]) -> None:
    engine = KeepingEngine()
    engine.info = structs.replace(engine.info, num_kept_tokens=0)
    (answer,) = ask(address, engine, body)
    assert answer.status_code == 200
    assert len(engine.requests) == 1


def test_media_before_a_document_are_read_with_the_request(
    address: str, body: dict[str, Any]
) -> None:
    engine = KeepingEngine()
    picture = image_part(data_url(encoded(Image.new("RGB", (30, 30), "red"), "PNG"), "png"))
    body["messages"][0]["content"].insert(0, picture)
    (answer,) = ask(address, engine, body)
    assert answer.status_code == 200
    assert len(engine.requests) == 1


class FailsAhead(KeepingEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            yield event
            if "-ahead-" in request.request_id:
                raise EngineUnavailable("it went away; try again")


def test_failure_of_a_beginning_does_not_fail_the_request(
    address: str, body: dict[str, Any]
) -> None:
    engine = FailsAhead()
    (answer,) = ask(address, engine, body)
    assert answer.status_code == 200
    assert len(engine.ahead) == 1


class HangsAhead(KeepingEngine):
    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            yield event
            if "-ahead-" in request.request_id:
                self.has_begun.set()
                await asyncio.Event().wait()


def test_request_does_not_wait_long_for_a_beginning(address: str, body: dict[str, Any]) -> None:
    engine = HangsAhead()
    (answer,) = ask(address, engine, body)
    assert answer.status_code == 200
    assert len(engine.ahead) == 1


def test_beginning_is_aborted_with_its_request(address: str, body: dict[str, Any]) -> None:
    engine = HangsAhead()

    async def main() -> None:
        async with frontend(address, engine=engine) as http:
            asked = asyncio.create_task(post(http, body))
            await engine.has_begun.wait()
            asked.cancel()
            await asyncio.wait([asked])
            await check_released(address, engine)

    asyncio.run(main())
    assert len(engine.requests) == 1


class SlowStore:
    """Store whose answers about beginnings never come, though the daemon has pinned objects."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store, self.has_pinned = store, asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def acquire(self, request_id: str, *asked: Any, **options: Any) -> Any:
        outcomes = await self._store.acquire(request_id, *asked, **options)
        if "-ahead-" in request_id:
            self.has_pinned.set()
            await asyncio.Event().wait()
        return outcomes


def test_nothing_stays_pinned_if_the_store_is_slow(address: str, body: dict[str, Any]) -> None:
    engine, stores = KeepingEngine(), list[SlowStore]()

    def slowed(store: AsyncDaemonStore) -> SlowStore:
        stores.append(SlowStore(store))
        return stores[0]

    async def main() -> None:
        async with frontend(address, engine=engine, wrap=slowed) as http:
            asked = asyncio.create_task(post(http, body))
            await stores[0].has_pinned.wait()
            asked.cancel()
            await asyncio.wait([asked])
            await check_released(address, engine)

    asyncio.run(main())
    assert not engine.requests


def test_no_more_is_computed_than_the_engine_keeps(address: str, body: dict[str, Any]) -> None:
    engine = KeepingEngine()
    engine.info = structs.replace(engine.info, num_kept_tokens=500)
    (answer,) = ask(address, engine, body)
    assert answer.status_code == 200
    assert engine.ahead
    assert max(len(request.token_ids) for request in engine.ahead) <= 500
    assert len(engine.requests[-1].token_ids) > 500


def test_pages_beside_too_long_texts_are_not_rendered(address: str, body: dict[str, Any]) -> None:
    engine = KeepingEngine()
    engine.info = structs.replace(engine.info, max_model_len=1000)
    fits, refused = ask(address, engine, body, _asking_more(body, "word " * 300))
    assert fits.status_code == 200
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "beside the texts" in refused.json()["error"]["message"]
    num_before = len(engine.requests)
    (refused,) = ask(address, engine, _asking_more(body, "word " * 3000))
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert len(engine.requests) == num_before


@pytest.mark.parametrize(("detail", "status"), [("auto", 400), ("low", 200)])
def test_pages_count_with_the_detail_that_is_asked_for(
    address: str, detail: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "LOW_DETAIL_PIXELS", 112 * 112)  # 30 tokens otherwise
    file = pdfs.of_images([Image.new("RGB", (1600, 1200), (9, 90, 200))])
    url = "data:application/pdf;base64," + base64.b64encode(file).decode()
    part = {"file_data": url, "filename": "a.pdf", "detail": detail}
    content = [{"type": "file", "file": part}]
    engine = KeepingEngine()
    engine.info = structs.replace(engine.info, max_model_len=34)
    body = {"model": "shapes", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    (answer,) = ask(address, engine, body)
    assert answer.status_code == status, answer.text
    assert (detail == "auto") == ("beside the texts" in answer.text)  # before it is rendered


def test_stored_conversation_may_have_more_than_a_prompt(
    address: str, body: dict[str, Any]
) -> None:
    engine = KeepingEngine()
    engine.info = structs.replace(engine.info, max_model_len=1000)
    file = body["messages"][0]["content"][1]["file"]
    content = [{"type": "input_file", **file}, {"type": "input_text", "text": "word " * 3000}]

    async def main() -> httpx.Response:
        async with frontend(address, engine=engine) as http:
            items = [{"type": "message", "role": "user", "content": content}]
            return await http.post("/v1/conversations", json={"items": items})

    assert asyncio.run(main()).status_code == 200


def _asking_more(body: dict[str, Any], text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {**body, "messages": [*body["messages"], message]}


def begun(documents: list[ReadDocument], compute: Any) -> list[GenerateRequest]:
    """Have beginnings of a request with these documents computed; return their requests."""
    asked: list[GenerateRequest] = []

    async def computed(request: GenerateRequest) -> Any:
        asked.append(request)
        return compute()

    async def main() -> None:
        message = Message("user", (DocumentPart("a"), DocumentPart("b")))
        ahead = PromptAhead(GenerateRequest(request_id="r", messages=(message,)), computed)
        async with ahead.running():
            ahead.begun([])
            ahead.begun(documents)
            for _ in range(100):
                await asyncio.sleep(0)

    asyncio.run(main())
    return asked


def page(number: int, *, has_image: bool = True) -> Page:
    image = MediaPart(Modality.IMAGE, SeenMedia(bytes([number]), is_page=True))
    return Page(number, image if has_image else None, f"text {number}")


def test_pages_of_text_alone_are_not_computed_ahead() -> None:
    texts = [page(number, has_image=False) for number in range(9)]
    assert not begun([ReadDocument(b"a", texts)], lambda: Computed(1, 0))
    images = [page(number) for number in range(9, 12)]
    (request,) = begun([ReadDocument(b"a", [*texts, *images])], lambda: Computed(1, 0))
    assert request.media == [each.image for each in images]


def test_a_beginning_has_a_few_more_pages_than_the_one_before() -> None:
    pages = [page(number) for number in range(60)]
    numbers = iter(range(1, 100))
    documents = [ReadDocument(b"a", pages[:33]), ReadDocument(b"b", pages[33:])]
    asked = begun(documents, lambda: Computed(number := next(numbers), number - 1))
    assert [len(request.media) for request in asked] == [
        *range(4, 40, 4), *(40, 45, 50, 56)
    ]  # fmt: skip


@pytest.mark.timeout(30)
def test_request_goes_on_when_the_beginning_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_ahead, "_LEAST_WAIT_S", 3600.0)

    async def main() -> None:
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def computed(_: GenerateRequest) -> Computed:
            has_begun.set()
            await may_end.wait()
            return Computed(1, 0)

        message = Message("user", (DocumentPart("a"),))
        ahead = PromptAhead(GenerateRequest(request_id="r", messages=(message,)), computed)
        async with ahead.running():
            ahead.begun([])
            ahead.begun([ReadDocument(b"a", [page(number) for number in range(60)])])
            await has_begun.wait()
            asyncio.get_running_loop().call_later(0.05, may_end.set)
        assert ahead.num_new == 1

    asyncio.run(main())


def test_once_the_engine_has_dropped_a_beginning_there_are_no_more() -> None:
    documents = [ReadDocument(b"a", [page(number) for number in range(60)])]
    numbers = iter(range(10, 1000))
    assert len(begun(documents, lambda: Computed(next(numbers), 0))) == 2


def test_unexpected_error_of_a_beginning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    documents = [ReadDocument(b"a", [page(number) for number in range(9)])]
    assert len(begun(documents, lambda: 1 // 0)) == 1
    assert "ZeroDivisionError" in caplog.text


def test_beginning_ends_with_the_last_known_page() -> None:
    pages = [page(number) for number in range(3)]
    before, after = Message("system", (TextPart("Be brief."),)), Message("user", (TextPart("So?"),))
    parts = (TextPart("A"), DocumentPart("a"), TextPart("B"), DocumentPart("b"), TextPart("C"))
    request = GenerateRequest(request_id="r", messages=(before, Message("user", parts), after))
    documents = [ReadDocument(b"a", pages[:2]), ReadDocument(b"b", pages[2:])]
    whole = with_pages(request, documents).messages[1].parts
    for number, end in ((1, 5), (2, 8)):
        begun = beginning(request, documents[:number]).messages
        assert begun == (before, Message("user", whole[:end]))
