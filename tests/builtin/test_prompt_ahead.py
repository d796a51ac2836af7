"""Beginnings of a prompt reach the engine while other pages are rendered."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from afferent.builtin.pipeline.document_pages import beginning, with_pages
from afferent.builtin.pipeline.request import GenerateRequest, Message, TextPart
from afferent.engines.protocol import (
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Tokens,
)
from afferent.errors import EngineUnavailable
from afferent.items.documents import Page, ReadDocument
from afferent.items.request import DocumentPart, MediaPart, SeenMedia
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Modality
from tests import pdfs
from tests.builtin.frontends import ScriptedEngine, frontend, post
from tests.images import encoded
from tests.server import data_url, image_part

NUM_PAGES = 24


class KeepingEngine(ScriptedEngine):
    """Engine that keeps prompts, and records what it computed anew of each."""

    info = EngineInfo(100_000, [2], keeps_prompts=True)

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
            return [await post(http, body) for body in bodies]

    answers = asyncio.run(main())
    assert engine.num_running == 0
    with DaemonStore(address, name="looker") as store:
        assert all(not info.pins for info in store.list_objects())
    return answers


def test_engine_computes_each_token_once(address: str, body: dict[str, Any]) -> None:
    engine = KeepingEngine()
    first, again = (answer.json() for answer in ask(address, engine, body, body))
    asked = engine.requests[-1]
    assert first["choices"][0]["message"]["content"] == "a"
    assert 1 <= len(engine.ahead) <= NUM_PAGES // 4
    for request in engine.ahead:
        end = len(request.token_ids)
        assert request.token_ids == asked.token_ids[:end]
        assert [item.key for item in request.items] == [
            item.key for item in asked.items if item.placeholder.offset < end
        ]
        assert request.sampling.max_tokens == 1
    *_, whole, repeated = engine.num_new
    assert sum(engine.num_new) - repeated == len(asked.token_ids) == first["usage"]["prompt_tokens"]
    assert whole < len(asked.token_ids), "a part of it was computed ahead"
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again)]
    assert cached == [0, len(asked.token_ids) - 1], "of this request, nothing was cached"


def test_engine_that_drops_its_prompts_gets_two_beginnings(
    address: str, body: dict[str, Any]
) -> None:
    engine = KeepingEngine(keeps=False)
    (answer,) = ask(address, engine, body)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 1 <= len(engine.ahead) <= 2


def test_engine_that_keeps_no_prompts_gets_none(address: str, body: dict[str, Any]) -> None:
    engine = KeepingEngine()
    engine.info = structs.replace(engine.info, keeps_prompts=False)
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
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            yield event
            if "-ahead-" in request.request_id:
                await asyncio.Event().wait()


def test_beginning_is_aborted_with_its_request(address: str, body: dict[str, Any]) -> None:
    engine = HangsAhead()
    (answer,) = ask(address, engine, body, request_timeout_s=3.0)
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert len(engine.requests) == len(engine.ahead) == 1


def test_beginning_ends_with_the_last_known_page() -> None:
    pages = [
        Page(number, MediaPart(Modality.IMAGE, SeenMedia(bytes([number]), is_page=True)), text)
        for number, text in enumerate(("one", "", "three"), 1)
    ]
    before, after = Message("system", (TextPart("Be brief."),)), Message("user", (TextPart("So?"),))
    parts = (TextPart("A"), DocumentPart("a"), TextPart("B"), DocumentPart("b"), TextPart("C"))
    request = GenerateRequest(request_id="r", messages=(before, Message("user", parts), after))
    documents = [ReadDocument(b"a", pages[:2]), ReadDocument(b"b", pages[2:])]
    whole = with_pages(request, documents).messages[1].parts
    for number, end in ((1, 4), (2, 7)):
        begun = beginning(request, documents[:number]).messages
        assert begun == (before, Message("user", whole[:end]))
