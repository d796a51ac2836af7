"""Conversations that one frontend stores and another one continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from afferent.admission.shares import Share
from afferent.builtin.apis.responses.api import OpenAIResponses
from afferent.builtin.pipeline import conversations as history
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.conversations import MAX_NBYTES, MAX_PARTS, Conversation, History
from afferent.builtin.pipeline.request import Message, Output, PromptInfo, TextPart
from afferent.errors import Param, ResponseNotFound, StoreFull, StoreUnavailable
from afferent.items.request import MediaPart, SeenMedia
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB, Modality, ObjectKind, ReserveItem
from tests.builtin.dialogues import outputs, received
from tests.store.stores import SharedDaemon

Result = TypeVar("Result")

ARENA_NBYTES = 4 * MiB
SHARES = {ObjectKind.FEATURES: 0.5, ObjectKind.RECORDS: 0.5}
DIGEST = bytes(range(32))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SharedDaemon]:
    with SharedDaemon(ARENA_NBYTES, SHARES) as shared:
        yield shared


@pytest.fixture
def address(store_address: str) -> str:
    """Return the address of a store without a worker, which these tests don't need."""
    return store_address


class Side:
    """The conversation history of one frontend."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        self.store, self.history = store, History(store)

    async def answer(self, call: Call, said: list[Output]) -> list[Output]:
        call = await self.history.resume(call)
        return [output async for output in self.history.follow(call, _say(said))]


def counted(outcome: str) -> float:
    """Return the number of this test's conversations that all frontends have counted."""
    return history.CONVERSATIONS.labels(outcome).values[0]


async def _say(said: list[Output]) -> AsyncGenerator[Output, None]:
    for output in said:
        yield output


@asynccontextmanager
async def sides(address: str) -> AsyncIterator[tuple[Side, Side]]:
    first = await AsyncDaemonStore.connect(address, name="first", writable=True)
    second = await AsyncDaemonStore.connect(address, name="second", writable=True)
    try:
        yield Side(first), Side(second)
    finally:
        await first.close()
        await second.close()


def call(
    number: int, given: Any, *, before: int | None = None, tenant: str = "", **parameters: Any
) -> Call:
    if before is not None:
        parameters["previous_response_id"] = f"resp_{before}"
    api = OpenAIResponses()
    body = received({"model": "shapes", "input": given, **parameters}, api.media_keys)
    found = api.parse(body, request_id=f"resp_{number}", model="shapes")
    return replace(found, generate=structs.replace(found.generate, share=Share(tenant)))


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def assistant(text: str) -> Message:
    return Message("assistant", (TextPart(text),))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


_parts = st.text(max_size=20).map(TextPart) | st.builds(
    MediaPart,
    st.sampled_from(list(Modality)),
    st.just("https://example.com/a") | st.binary(min_size=32, max_size=32).map(SeenMedia),
    st.sampled_from(["auto", "low", "high"]),
)
_messages = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.lists(_parts, max_size=4).map(tuple),
    ),
    max_size=5,
)


@settings(deadline=None, derandomize=True)
@given(_messages, st.data())
def test_media_are_kept_by_their_digests(messages: list[Message], data: st.DataObject) -> None:
    number = sum(isinstance(part, MediaPart) for message in messages for part in message.parts)
    digest = st.binary(min_size=32, max_size=32)
    digests = data.draw(st.lists(digest, min_size=number, max_size=number))
    kept = msgspec.msgpack.encode(Conversation.of(messages, digests, b"{}"))
    left = iter(digests)
    assert msgspec.msgpack.decode(kept, type=Conversation).messages == tuple(
        Message(
            message.role,
            tuple(
                MediaPart(part.modality, SeenMedia(next(left)), part.detail)
                if isinstance(part, MediaPart)
                else part
                for part in message.parts
            ),
        )
        for message in messages
    )


def test_another_frontend_goes_on(address: str) -> None:
    """The prompt has all earlier messages, but only the latest instructions."""

    async def main() -> None:
        async with sides(address) as (one, other):
            image = {"type": "input_image", "image_url": "https://example.com/a.png"}
            text = {"type": "input_text", "text": "What?"}
            first = call(1, [{"role": "user", "content": [image, text]}], instructions="Short.")
            said = [PromptInfo((DIGEST,), 12), *outputs("a red", " circle")[1:]]
            assert await one.answer(first, said) == said
            second = call(2, "Sure?", before=1, instructions="Long.")
            media = MediaPart(Modality.IMAGE, SeenMedia(DIGEST))
            said = (
                Message("user", (media, TextPart("What?"))),
                assistant("a red circle"),
                user("Sure?"),
            )
            resumed = (await other.history.resume(second)).generate.messages
            assert resumed == (Message("system", (TextPart("Long."),)), *said)
            await other.answer(second, [PromptInfo((DIGEST,), 20), *outputs("yes")[1:]])
            third = await one.history.resume(call(3, "Why?", before=2))
            assert third.generate.messages == (*said, assistant("yes"), user("Why?"))
            assert (counted("kept"), counted("resumed")) == (2, 3)
            statistics = await one.store.stat()
            assert (statistics.num_objects, statistics.held_nbytes) == (2, 0)

    run(main())


def test_the_answer_is_kept_as_it_was_given(address: str) -> None:
    async def main() -> None:
        async with sides(address) as (one, other):
            asked = call(1, "What?", metadata={"a": "b"})
            said = outputs("a red", " circle")
            await one.answer(asked, said)
            kept = await other.history.find("request", "", "resp_1")
            assert kept is not None
            for output in said:
                asked.reply.output(output)
            (frame,) = asked.reply.finish()
            (data,) = [line for line in frame.split(b"\n") if line.startswith(b"data: ")]
            completed = msgspec.json.decode(data.removeprefix(b"data: "))
            assert msgspec.json.decode(kept.answer) == completed["response"]

    run(main())


def test_the_conversation_is_kept_before_the_end_is_told(address: str) -> None:
    async def main() -> None:
        async with sides(address) as (one, other):
            followed = one.history.follow(call(1, "What?"), _say(outputs("a")))
            async for output in followed:
                kept = await other.history.find("request", "", "resp_1")
                assert (kept is not None) == (output == outputs("a")[-1])

    run(main())


def test_what_is_not_kept(address: str) -> None:
    """Interrupted and deleted answers, and those of another tenant, are unknown."""

    async def main() -> None:
        async with sides(address) as (one, other):
            await one.answer(call(1, "What?", tenant="ours"), outputs("a"))
            followed = one.history.follow(call(2, "What?"), _say(outputs("a", "b")))
            await anext(followed)
            await followed.aclose()
            assert await other.history.find("request", "ours", "resp_1") is not None
            unknown = [("", "resp_1"), ("theirs", "resp_1"), ("", "resp_2"), ("", "x" * 10_000)]
            for tenant, response_id in unknown:
                assert await other.history.find("request", tenant, response_id) is None
                assert not await other.history.delete(tenant, response_id)
            with pytest.raises(ResponseNotFound, match="'resp_1' is not kept") as caught:
                await other.history.resume(call(3, "And?", before=1))
            assert caught.value.param is Param.PREVIOUS_ANSWER
            assert counted("unknown") == 1
            assert await other.history.delete("ours", "resp_1")
            assert await one.history.find("request", "ours", "resp_1") is None

    run(main())


def test_a_conversation_that_is_too_long(address: str) -> None:
    async def main() -> None:
        async with sides(address) as (one, _):
            said = outputs("a")
            assert await one.answer(call(1, "x" * (MAX_NBYTES - 2000)), said) == said
            assert await one.answer(call(2, "y" * 3000, before=1), said) == said
            assert (counted("kept"), counted("too_long")) == (1, 1)
            with pytest.raises(ResponseNotFound, match=f"more than {MAX_NBYTES} bytes"):
                await one.history.resume(call(3, "And?", before=2))

    run(main())


def test_a_conversation_of_too_many_parts(address: str) -> None:
    """The number of parts is limited: a body could have tens of thousands of empty ones."""

    async def main() -> None:
        async with sides(address) as (one, _):
            said, part = outputs("a"), {"type": "input_text", "text": ""}
            most = [{"role": "user", "content": [part] * (MAX_PARTS - 3)}]
            assert await one.answer(call(1, most), said) == said
            assert await one.answer(call(2, "And?", before=1), said) == said
            assert (counted("kept"), counted("too_long")) == (1, 1)

    run(main())


def test_conversations_make_room_for_one_another(address: str) -> None:
    """New conversations evict the oldest ones."""

    async def main() -> None:
        async with sides(address) as (one, _):
            text = "x" * (MAX_NBYTES // 2)
            for number in range(40):
                await one.answer(call(number, text), outputs("a"))
            assert counted("kept") == 40
            assert await one.history.find("request", "", "resp_39") is not None
            assert await one.history.find("request", "", "resp_0") is None
            statistics = await one.store.stat()
            assert statistics.used_nbytes <= ARENA_NBYTES
            assert statistics.held_nbytes == 0

    run(main())


def test_without_room_the_answer_is_given_all_the_same(address: str) -> None:
    async def main() -> None:
        async with sides(address) as (one, other):
            kind = ObjectKind.RECORDS
            share = (await other.store.stat()).kinds[kind].capacity_nbytes
            await other.store.reserve("all", [ReserveItem(kind, share)])
            said = outputs("a")
            assert await one.answer(call(1, "What?"), said) == said
            assert (counted("kept"), counted("no_room")) == (0, 1)

    run(main())


def test_what_is_kept_is_not_called_gone_while_others_have_the_room(address: str) -> None:
    async def main() -> None:
        async with sides(address) as (one, other):
            await one.answer(call(1, "What?"), outputs("a"))
            kind = ObjectKind.RECORDS
            share = (await other.store.stat()).kinds[kind].capacity_nbytes
            await other.store.reserve("all", [ReserveItem(kind, share)])
            with pytest.raises(StoreFull):
                await one.history.resume(call(2, "Why?", before=1))
            await other.store.release("all")
            await one.history.resume(call(2, "Why?", before=1))
            assert (counted("resumed"), counted("unknown")) == (1, 0)

    run(main())


def test_without_a_store() -> None:
    async def main() -> None:
        with StoreServer(ARENA_NBYTES, shares=DEFAULT_SHARES) as server:
            store = await AsyncDaemonStore.connect(server.address, name="one", writable=True)
        side, said = Side(store), outputs("a")
        try:
            with pytest.raises(StoreUnavailable):
                await side.answer(call(2, "And?", before=1), said)
            assert await side.answer(call(1, "What?"), said) == said
            assert counted("no_room") == 1
        finally:
            await store.close()

    run(main())


class Stuck:
    """A store that never answers."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def create(self, request_id: str, items: Any) -> Any:
        await asyncio.Event().wait()

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def test_the_end_does_not_wait_for_a_store_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_KEEP_TIMEOUT_S", 0.05)

    async def main() -> None:
        stuck: Any = Stuck()
        side, said = Side(stuck), outputs("a")
        assert await side.answer(call(1, "What?"), said) == said
        assert counted("no_room") == 1
        assert stuck.forgotten == ["resp_1"]

    run(main())
