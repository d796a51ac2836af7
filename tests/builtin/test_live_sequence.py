"""Sequences of live sessions: an engine gets each item once, as in one prompt of all items."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from afferent.builtin.pipeline.live_log import LiveLog
from afferent.builtin.pipeline.live_session import Added, LiveItem
from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.request import Message, TemplateOptions, TextPart
from afferent.builtin.pipeline.stored_turns import Turn
from afferent.engines.protocol import (
    Accepted,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    KeptSession,
    Tokens,
)
from afferent.errors import SessionLost
from afferent.media.workers.discover import family_of
from afferent.store.client.async_store import AsyncDaemonStore
from tests.builtin.frontends import SHAPES, preprocess_worker
from tests.builtin.live import Live, connected, image_part, live_server, text_part
from tests.images import encoded
from tests.models import make_llava, make_one_token
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

PICTURES = [encoded(Image.new("RGB", (8, 8), (shade, 0, 0)), "PNG") for shade in (10, 90, 200)]
SAID = "So. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-token")
    make_one_token(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> PromptBuilder:
    return PromptBuilder(folder, family_of(folder))


@pytest.fixture
def address(store_address: str, folder: Path) -> Iterator[str]:
    with preprocess_worker(store_address, family_of(folder)):
        yield store_address


class SessionEngine:
    """Engine that stores the tokens of sessions, and answers with ``SAID`` and the end token."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self.said = prompts.plain(SAID)
        (self.end,) = prompts.plain("<|end|>")
        self.info = EngineInfo(100_000, [self.end], has_sessions=True)
        self.tokens: dict[str, list[int]] = {}
        self.num_items: dict[str, int] = {}
        self.requests: list[EngineRequest] = []
        self.left: list[str] = []
        self.marks: dict[str, tuple[bytes, int | None]] = {}
        self.losses = iter(())

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        assert request.session_id
        await asyncio.sleep(0)
        self.requests.append(request)
        if request.start == 0:
            self.tokens[request.session_id], self.num_items[request.session_id] = [], 0
        tokens = self.tokens.get(request.session_id)
        if tokens is None or (request.start and next(self.losses, False)):
            self.tokens.pop(request.session_id, None)
            raise SessionLost("gone")
        assert request.start == len(tokens)
        for item in request.items:
            place = item.placeholder
            ids = request.token_ids[place.offset : place.offset + place.length]
            assert len(set(ids)) == 1
        tokens += request.token_ids
        self.num_items[request.session_id] += len(request.items)
        yield Accepted()
        if request.has_answer:
            yield Tokens(list(self.said), [], num_cached=request.start)
            tokens += [*self.said, self.end]
            self.marks[request.session_id] = (request.mark, self.end)
            yield Finished("stop", [], self.end)
        else:
            self.marks[request.session_id] = (request.mark, None)
            yield Finished("stop", [])

    def end_session(self, session_id: str) -> None:
        self.left.append(session_id)

    async def find_session(self, session_id: str) -> KeptSession | None:
        tokens = self.tokens.get(session_id)
        return None if tokens is None else KeptSession(len(tokens), *self.marks[session_id])

    async def stats(self) -> None:
        return None


def test_templates_that_count_pictures_or_join_messages_are_not_appended(
    tmp_path: Path, prompts: PromptBuilder
) -> None:
    make_llava(tmp_path)
    assert prompts.can_append
    assert not PromptBuilder(tmp_path, family_of(tmp_path)).can_append
    assert not PromptBuilder(SHAPES, family_of(SHAPES)).can_append


def test_answer_whose_sequence_the_engine_has_lost_begins_another(
    address: str, folder: Path, prompts: PromptBuilder
) -> None:
    engine = SessionEngine(prompts)

    async def main() -> None:
        async with (
            live_server(address, engine=engine, folder=folder) as url,
            connected(url) as live,
        ):
            await live.add(text_part("one?"))
            assert (await live.answer()).status == "completed"
            await live.add(text_part("two?"))
            await until(lambda: not engine.requests[-1].has_answer)  # the item was computed
            num_before = len(engine.requests)
            engine.losses = iter([True])
            assert (await live.answer()).status == "completed"
            assert [each.start > 0 for each in engine.requests[num_before:]][:2] == [True, False]
            assert engine.requests[num_before].has_answer

    asyncio.run(main())


def test_answer_computes_only_what_is_new(
    address: str, folder: Path, prompts: PromptBuilder
) -> None:
    """300 frames: each answer's input is as long as the first one's."""
    engine = SessionEngine(prompts)

    async def main() -> None:
        async with (
            live_server(address, engine=engine, folder=folder) as url,
            connected(url) as live,
        ):
            new = []
            for number in range(300):
                await live.add(image_part(PICTURES[number % 3]))
                if number % 50 == 49:
                    await live.add(text_part("and now?"))
                    usage = (await live.answer()).usage
                    new.append(usage.input_tokens - usage.input_token_details.cached_tokens)
            assert engine.num_items[live.session_id] == 300
            assert max(new) <= 60, new  # of at most the last items, and the question
            sent = sum(len(request.token_ids) for request in engine.requests)
            assert sent < usage.input_tokens + 10

    asyncio.run(main())


def test_session_that_another_connection_continues_computes_no_item_again(
    address: str, folder: Path, prompts: PromptBuilder
) -> None:
    """Also after an answer and after items; a changed beginning is computed again."""
    engine = SessionEngine(prompts)

    async def again(url: str, session_id: str) -> int:
        """Ask once more; return the number of tokens that were computed."""
        async with connected(url, session_id=session_id) as live:
            await live.add(text_part("and now?"))
            usage = (await live.answer()).usage
            return int(usage.input_tokens - usage.input_token_details.cached_tokens)

    async def main() -> None:
        async with live_server(address, engine=engine, folder=folder) as url:
            async with connected(url) as live:
                session_id = live.session_id
                pictures = [
                    (await live.add(image_part(PICTURES[number % 3]))).id for number in range(30)
                ]
            first, second = await again(url, session_id), await again(url, session_id)
            assert second < 30
            assert sum(request.start == 0 for request in engine.requests) == 1
            assert engine.num_items[session_id] == 30
            # Its sequence has an item that the session has no more.
            async with connected(url, session_id=session_id) as live:
                engine.tokens[session_id].append(0)
                await live.send(type="conversation.item.delete", item_id=pictures[3])
                await live.until("conversation.item.deleted")
            await again(url, session_id)
            assert engine.num_items[session_id] == 29
            print(first, second)

    asyncio.run(main())


def test_step_of_a_long_session_makes_as_many_calls_as_one_of_a_short_session(
    address: str, folder: Path, prompts: PromptBuilder
) -> None:
    """A step is an item and an answer; calls of Python, in client and server, are counted."""

    async def fill(session_id: str, num_items: int) -> None:
        """Write a session to the store, as another frontend would have done."""
        connecting = AsyncDaemonStore.connect(address, name="writer", writable=True)
        async with await connecting as store:
            log = LiveLog(store, tenant="", session_id=session_id, lease="reader")
            for number in range(num_items):
                message = Message("user", (TextPart(f"{number}"),))
                item = LiveItem(f"item_{number}", Turn.of(message, iter(())), float(number), 3)
                await log.append(Added(item))
            log.close()

    async def step(live: Live) -> int:
        """Return the number of calls."""
        num_calls = 0

        def count(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            await live.add(text_part("and now?"))
            await live.answer()
        finally:
            sys.setprofile(None)
        return num_calls

    async def main() -> None:
        engine, counts = SessionEngine(prompts), []
        async with live_server(address, engine=engine, folder=folder) as url:
            for num_items in (100, 2_100):
                await fill(f"sess_{num_items}", num_items)
                async with connected(url, session_id=f"sess_{num_items}") as live:
                    await live.answer()
                    counts.append(min([await step(live) for _ in range(6)]))
        print(f"calls of a step: {counts}")
        assert counts[1] - counts[0] < 500  # one for each fourth further item

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_generated_events_give_the_tokens_of_the_whole_conversation(
    address: str, folder: Path, prompts: PromptBuilder, seed: int
) -> None:
    print(f"seed {seed}")
    rng, engine = random.Random(seed), SessionEngine(prompts)
    engine.losses = iter(lambda: rng.random() < 0.02, None)

    async def main() -> None:
        async with live_server(address, engine=engine, folder=folder, max_images=5) as url:
            session_id = None
            for _ in range(3):
                async with connected(url, session_id=session_id) as live:
                    session_id = live.session_id
                    await live.send(type="session.update", session={"instructions": "Be brief."})
                    for _ in range(25):
                        await step(live, rng)
                    await live.send(type="session.update", session={"window": None})
                    await live.add(text_part("last?"))
                    response = await live.answer()
                    assert response.output[0].content[0].text == SAID
                    await check(address, session_id, response, engine, prompts, live)

    asyncio.run(main())


async def check(
    address: str,
    session_id: str,
    response: Any,
    engine: SessionEngine,
    prompts: PromptBuilder,
    live: Live,
) -> None:
    """Check the engine's tokens against those of the stored conversation, as one prompt."""
    store = await AsyncDaemonStore.connect(address, name="reader", writable=True)
    tokens = list(engine.tokens[session_id])
    async with store:
        log = await LiveLog.resume(store, tenant="", session_id=session_id, lease="reader")
        messages = [item.turn.message for item in log.session]
        log.close()
    whole = [Message("system", (TextPart("Be brief."),)), *messages]
    media = [part for message in whole for part in message.media]
    plain = TemplateOptions(begins_answer=False)
    expected = prompts.build(whole, [(1,)] * len(media), plain).token_ids
    assert tokens == expected
    assert engine.num_items[session_id] == len(media)
    assert response.usage.input_tokens == len(tokens) - len(engine.said) - 1


async def step(live: Live, rng: random.Random) -> None:
    choice = rng.random()
    if choice < 0.5:
        await live.add(image_part(rng.choice(PICTURES)))
    elif choice < 0.65:
        await live.add(text_part(rng.choice(("a", "b c", "what? "))), role="user")
    elif choice < 0.7:
        await live.add(image_part(PICTURES[0]), previous_item_id="root")
    elif choice < 0.8:
        item = await live.add(text_part("x"))
        await live.send(type="conversation.item.delete", item_id=item.id)
        await live.until("conversation.item.deleted")
    elif choice < 0.85:
        window = {"items": rng.choice((None, 12))}
        await live.send(type="session.update", session={"window": window})
        await live.until("session.updated")
    else:
        assert (await live.answer()).status == "completed"
