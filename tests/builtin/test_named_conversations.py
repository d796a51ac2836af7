"""Conversations with an id: changes by several frontends, and by processes that are killed."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afferent.builtin.apis.responses.conversations import item_json
from afferent.builtin.apis.responses.input import InputItem, read_input
from afferent.builtin.pipeline.named_conversations import (
    ConversationItem,
    NamedConversation,
    NamedConversations,
    NewItem,
    joined,
)
from afferent.builtin.pipeline.request import CallPart, Message, TextPart
from afferent.builtin.pipeline.stored_turns import MAX_NBYTES
from afferent.errors import ConversationNotFound, InvalidRequest
from afferent.items.request import ALL_PAGES, DocumentPart, MediaPart, PageRange, SeenMedia
from afferent.media.body.received import ReceivedBody
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import MiB, Modality, ObjectKind
from tests.store.stores import SharedDaemon

SHARES = {ObjectKind.FEATURES: 0.5, ObjectKind.RECORDS: 0.5}

WRITER = """
import asyncio, sys
from afferent.builtin.pipeline.named_conversations import NamedConversations
from afferent.store.client.async_store import AsyncDaemonStore
from tests.builtin.test_named_conversations import saying

async def main(address, conversation_id):
    store = await AsyncDaemonStore.connect(address, name="writer", writable=True)
    conversations = NamedConversations(store)
    number = 0
    while True:
        number += 1
        added = saying(str(number))
        await conversations.change(
            f"request-{number}", "", conversation_id, lambda old: old.with_items([added])
        )
        print(number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[SharedDaemon]:
    with SharedDaemon(4 * MiB, SHARES) as shared:
        yield shared


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def saying(text: str) -> ConversationItem:
    message = Message("user", (TextPart(text),))
    return NewItem("message", message, role="user").stored(iter(()))


def texts(conversation: NamedConversation) -> list[str]:
    return [
        part.text
        for message in conversation.messages
        for part in message.parts
        if isinstance(part, TextPart)
    ]


@asynccontextmanager
async def frontends(address: str, number: int) -> AsyncIterator[list[NamedConversations]]:
    stores = [
        await AsyncDaemonStore.connect(address, name=f"frontend {n}", writable=True)
        for n in range(number)
    ]
    try:
        yield list(map(NamedConversations, stores))
    finally:
        for store in stores:
            await store.close()


def test_no_change_of_several_frontends_is_lost(store_address: str) -> None:
    """Forty changes at once, by four frontends: each is there, and once."""

    async def main() -> None:
        async with frontends(store_address, 4) as sides:
            new = NamedConversation.new({}, now_s=0)
            await sides[0].add("first", "", new)

            async def add(number: int) -> None:
                item = saying(str(number))
                await sides[number % 4].change(
                    f"request-{number}", "", new.id, lambda old: old.with_items([item])
                )

            await asyncio.gather(*map(add, range(40)))
            found = await sides[1].find("last", "", new.id)
            assert found.number == 40
            assert sorted(map(int, texts(found))) == list(range(40))

    run(main())


def test_a_change_that_fails_leaves_the_conversation(store_address: str) -> None:
    async def main() -> None:
        async with frontends(store_address, 2) as (one, other):
            new = NamedConversation.new({"a": "b"}, now_s=0).with_items([saying("hello")])
            await one.add("first", "", new)

            def refuse(_: NamedConversation) -> NamedConversation:
                raise InvalidRequest("no")

            with pytest.raises(InvalidRequest, match="no"):
                await one.change("second", "", new.id, refuse)
            found = await other.find("third", "", new.id)
            assert (found.metadata, texts(found), found.number) == ({"a": "b"}, ["hello"], 0)
            after = await other.change("fourth", "", new.id, lambda old: old)
            assert after.number == 1

    run(main())


def test_another_tenant_finds_nothing(store_address: str) -> None:
    async def main() -> None:
        async with frontends(store_address, 1) as (one,):
            new = NamedConversation.new({}, now_s=0)
            await one.add("first", "anna", new)
            with pytest.raises(ConversationNotFound):
                await one.find("second", "ben", new.id)
            with pytest.raises(ConversationNotFound):
                await one.delete("third", "ben", new.id)
            await one.delete("fourth", "anna", new.id)
            with pytest.raises(ConversationNotFound):
                await one.change("fifth", "anna", new.id, lambda old: old)

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_leaves_whole_changes(store_address: str, seed: int) -> None:
    """All changes that the killed process was told of are there, in order, and others can go on."""
    chance, new = random.Random(seed), NamedConversation.new({}, now_s=0)

    async def begin() -> None:
        async with frontends(store_address, 1) as (side,):
            await side.add("first", "", new)

    async def check(num_told: int) -> None:
        async with frontends(store_address, 1) as (side,):
            last = saying("last")
            after = await side.change("next", "", new.id, lambda old: old.with_items([last]))
            number = len(after.items) - 1
            assert texts(after) == [*map(str, range(1, number + 1)), "last"]
            assert number >= num_told
            assert after.number == number + 1

    run(begin())
    arguments = [sys.executable, "-c", WRITER, store_address, new.id]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(chance.randrange(1, 20))]
        # It has gone on meanwhile: the signal comes between any two steps of its change.
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout
    run(check(int(told[-1])))


def test_one_that_is_too_long_is_not_continued() -> None:
    long = NamedConversation.new({}, now_s=0).with_items([saying("x" * MAX_NBYTES)])
    with pytest.raises(InvalidRequest, match="delete items"):
        long.check_room()
    many = NamedConversation.new({}, now_s=0).with_items([saying("") for _ in range(2000)])
    many.check_room()
    with pytest.raises(InvalidRequest, match="4096 messages and parts"):
        many.check_room([Message("user", (TextPart(""),) * 200)])


def test_calls_belong_to_the_text_before() -> None:
    call, other = CallPart("look", "{}"), CallPart("read", "{}")
    user = Message("user", (TextPart("hi"),))
    assert joined(
        [
            user,
            Message("assistant", (TextPart("Well."),)),
            Message("assistant", (call,)),
            Message("assistant", (other,)),
            Message("tool", (TextPart("seen"),)),
            Message("assistant", (call,)),
            Message("assistant", (TextPart(""),)),
            Message("assistant", (other,)),
            user,
        ]
    ) == (
        user,
        Message("assistant", (TextPart("Well."), call, other)),
        Message("tool", (TextPart("seen"),)),
        Message("assistant", (call,)),
        Message("assistant", (other,)),
        user,
    )


_parts = st.text(max_size=5).map(TextPart) | st.builds(
    MediaPart, st.sampled_from(list(Modality)), st.just("https://example.com/a")
)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(_parts, max_size=4).map(tuple), max_size=5))
def test_items_keep_the_digests_of_their_media(
    contents: list[tuple[TextPart | MediaPart, ...]],
) -> None:
    number = sum(isinstance(part, MediaPart) for parts in contents for part in parts)
    digests = [bytes([n]) * 32 for n in range(number)]
    left = iter(digests)
    items = [
        NewItem("message", Message("user", parts), role="user").stored(left) for parts in contents
    ]
    assert len({item.id for item in items}) == len(items)
    found = NamedConversation.new({}, now_s=0).with_items(items).messages
    media = [part for message in found for part in message.parts if isinstance(part, MediaPart)]
    assert [part.source for part in media] == list(map(SeenMedia, digests))


@pytest.mark.parametrize("pages", [ALL_PAGES, PageRange(3, 3), PageRange(2, 5), PageRange(4)])
@pytest.mark.parametrize("role", ["user", "assistant", "developer"])
def test_a_listed_item_can_be_sent_again(pages: PageRange, role: str) -> None:
    """The item that a client lists is read as the item that is stored."""
    text = TextPart("hello")
    digests = [bytes([n]) * 32 for n in range(4)]
    parts = (
        *(text, MediaPart(Modality.IMAGE, "https://example.com/a", "low")),
        *(MediaPart(Modality.AUDIO, "b"), MediaPart(Modality.VIDEO, "c")),
        DocumentPart("d", pages, 72, "high"),
    )
    said = parts if role == "user" else (text,)
    turn_role = "system" if role == "developer" else role
    items = [
        NewItem("message", Message(turn_role, said), role=role),
        NewItem("function_call", Message("assistant", (CallPart("f", '{"a": 1}'),)), call_id="c"),
        NewItem("function_call_output", Message("tool", (text,)), call_id="c"),
        NewItem("function_call_output", Message("tool", (text, parts[1])), call_id="d"),
    ]
    left = itertools.cycle(digests)
    stored = [item.stored(left) for item in items]
    listed = msgspec.json.encode(list(map(item_json, stored)))
    again = read_input(
        msgspec.json.decode(listed, type=list[InputItem]), ReceivedBody(listed, {}, len(listed))
    )
    assert [(each.kind, each.role, each.call_id) for each in again] == [
        (each.kind, each.role, each.call_id) for each in stored
    ]
    assert [each.message for each in again] == [each.turn.message for each in stored]
