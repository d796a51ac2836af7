"""Live sessions, with OpenAI's client and a frontend in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from PIL import Image
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from afferent.builtin.http import live_items
from afferent.builtin.pipeline.live_log import LiveLog
from afferent.config import Tenant
from afferent.errors import EngineUnavailable
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
from tests.builtin.frontends import ScriptedEngine
from tests.builtin.live import Live, connected, image_part, live_server, text_part
from tests.images import encoded

pytestmark = pytest.mark.timeout(60)

PICTURE = encoded(Image.new("RGB", (64, 64), (200, 30, 30)), "PNG")
OTHER = encoded(Image.new("RGB", (64, 64), (30, 200, 30)), "PNG")
ANSWER = '"#$'


def run(
    address: str, main: Callable[[Live], Awaitable[Any]], *, engine: Any = None, **options: Any
) -> Any:
    """Run a client in a session of its own."""

    async def serve() -> Any:
        async with live_server(address, engine=engine, **options) as url, connected(url) as live:
            return await main(live)

    return asyncio.run(serve())


class SlowEngine(ScriptedEngine):
    """Engine whose answers do not end until ``may_end`` is set."""

    def __init__(self) -> None:
        super().__init__([10])
        self.may_end = asyncio.Event()

    async def submit(self, request: Any) -> Any:
        async for event in super().submit(request):
            yield event
            if type(event).__name__ == "Tokens":
                await self.may_end.wait()


# Conversations


def test_question_about_a_picture_is_answered_in_the_events_of_the_official_client(
    address: str,
) -> None:
    engine = ScriptedEngine([10], [11, 12])

    async def main(live: Live) -> Any:
        assert live.created.session.output_modalities == ["text"]
        picture = await live.add(image_part(PICTURE))
        assert picture.content[0].type == "input_image"
        question = await live.add(text_part("What is it?"))
        response = await live.answer(instructions="Be brief.", max_output_tokens=9)
        kinds = [event.type for event in live.events]
        answer = response.output[0]
        added = [event for event in live.events if event.type == "conversation.item.added"]
        before = [event.previous_item_id for event in added]
        assert before == [None, picture.id, question.id]
        deltas = [e.delta for e in live.events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == answer.content[0].text == ANSWER
        return kinds, response

    kinds, response = run(address, main, engine=engine)
    item = ["conversation.item.added", "conversation.item.done"]
    assert kinds == [
        *("session.created", *item, *item),
        *("response.created", "response.output_item.added", "conversation.item.added"),
        "response.content_part.added",
        *("response.output_text.delta", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "conversation.item.done", "response.done"),
    ]
    (request,) = engine.requests
    assert (response.status, response.usage.output_tokens) == ("completed", 3)
    assert response.usage.input_tokens == len(request.token_ids)
    assert request.sampling.max_tokens == 9
    assert len(request.items) == 1


def test_next_answer_is_to_the_whole_conversation(address: str) -> None:
    engine = ScriptedEngine([10], [11, 12])

    async def main(live: Live) -> None:
        await live.add(image_part(PICTURE), text_part("What is it?"))
        await live.answer()
        await live.add(image_part(OTHER), image_part(PICTURE))
        await live.answer()

    run(address, main, engine=engine)
    first, second = engine.requests
    assert len(second.token_ids) > len(first.token_ids) + 3
    assert len(second.items) == 3
    assert second.items[0].key == second.items[2].key == first.items[0].key


def test_items_are_placed_retrieved_and_deleted(address: str) -> None:
    async def main(live: Live) -> None:
        last = await live.add(text_part("last"), item={"id": "last"})
        await live.add(text_part("first"), item={"id": "first"}, previous_item_id="root")
        await live.add(text_part("middle"), item={"id": "middle"}, previous_item_id="first")
        added = [e for e in live.events if e.type == "conversation.item.added"]
        assert [e.previous_item_id for e in added] == [None, None, "first"]
        await live.send(type="conversation.item.retrieve", item_id="middle")
        found = (await live.until("conversation.item.retrieved")).item
        assert found.content[0].text == "middle"
        await live.send(type="conversation.item.delete", item_id=last.id)
        assert (await live.until("conversation.item.deleted")).item_id == "last"
        error = await live.refused(type="conversation.item.retrieve", item_id="last")
        assert "no item 'last'" in error.message

    run(address, main)


def test_session_update_changes_only_what_it_names(address: str) -> None:
    async def main(live: Live) -> None:
        ratio = {"type": "retention_ratio", "retention_ratio": 0.5}
        session = {"type": "realtime", "instructions": "Be brief.", "truncation": ratio}
        await live.send(type="session.update", session={**session, "max_output_tokens": 7})
        updated = (await live.until("session.updated")).session
        assert (updated.instructions, updated.max_output_tokens) == ("Be brief.", 7)
        await live.send(type="session.update", session={"type": "realtime", "window": {"items": 3}})
        updated = (await live.until("session.updated")).session
        assert (updated.instructions, updated.truncation.retention_ratio) == ("Be brief.", 0.5)
        assert updated.window["items"] == 3

    run(address, main)


def test_items_that_come_during_an_answer_come_behind_it(store_address: str) -> None:
    engine = SlowEngine()

    async def main(live: Live) -> None:
        question = await live.add(text_part("one?"))
        await live.send(type="response.create")
        await live.until("response.output_text.delta")
        await live.send(
            type="conversation.item.create",
            item={"type": "message", "role": "user", "content": [text_part("two?")]},
        )
        later = await live.until("conversation.item.done")
        engine.may_end.set()
        answer = (await live.until("response.done")).response.output[0]
        assert later.previous_item_id == answer.id
        done = [e for e in live.events if e.type == "conversation.item.done"]
        assert (done[-1].item.id, done[-1].previous_item_id) == (answer.id, question.id)

    run(store_address, main, engine=engine)


def test_items_behind_an_answer_that_is_being_written_stay_there(store_address: str) -> None:
    """Another frontend reads the same order from the log."""
    engine = SlowEngine()

    async def main(live: Live) -> None:
        question = await live.add(text_part("one?"))
        await live.send(type="response.create")
        begun = await live.until("response.output_item.added")
        await live.until("response.output_text.delta")
        second = await live.add(text_part("two?"), previous_item_id=begun.item.id)
        third = {"type": "message", "role": "user", "content": [text_part("three?")]}
        error = await live.refused(
            type="conversation.item.create", previous_item_id=begun.item.id, item=third
        )
        assert "being written" in error.message
        engine.may_end.set()
        await live.until("response.done")
        store = await AsyncDaemonStore.connect(store_address, name="reader", writable=True)
        log = await LiveLog.resume(store, tenant="", session_id=live.session_id, lease="reader")
        order = [item.id for item in log.session]
        log.close()
        await store.close()
        assert order == [question.id, begun.item.id, second.id]

    run(store_address, main, engine=engine)


def test_answer_is_cancelled_and_what_was_written_stays(store_address: str) -> None:
    engine = SlowEngine()

    async def main(live: Live) -> None:
        await live.add(text_part("one?"))
        await live.send(type="response.create")
        await live.until("response.output_text.delta")
        error = await live.refused(type="response.create")
        assert "is being written" in error.message
        await live.send(type="response.cancel")
        response = (await live.until("response.done")).response
        assert (response.status, response.status_details.reason) == (
            "cancelled",
            "client_cancelled",
        )
        assert response.output[0].status == "incomplete"
        assert engine.num_running == 0
        error = await live.refused(type="response.cancel")
        assert "no such response" in error.message
        engine.may_end.set()
        assert (await live.answer()).status == "completed"

    run(store_address, main, engine=engine)


def test_answer_that_takes_too_long_fails_and_the_session_goes_on(store_address: str) -> None:
    engine = SlowEngine()

    async def main(live: Live) -> None:
        await live.add(text_part("one?"))
        response = await live.answer()
        assert response.status == "failed"
        assert response.status_details.error.code == "deadline_exceeded"
        assert engine.num_running == 0
        engine.may_end.set()
        assert (await live.answer()).status == "completed"

    run(store_address, main, engine=engine, request_timeout_s=0.5)


# Wrong events

HOSTILE: list[tuple[str | bytes, str]] = [
    ("", "invalid_request"),
    ("{", "invalid_request"),
    ("[]", "invalid_request"),
    ("null", "invalid_request"),
    ('{"type": 1}', "invalid_request"),
    ('{"type": "conversation.item.create"', "invalid_request"),
    ("[" * 100_000, "invalid_request"),
    (b"\x00\xff", "invalid_request"),
    ('{"event_id": "x"}', "invalid_request"),
    ('{"type": "x", "type": "response.cancel"}', "invalid_request"),
    ('{"type": "conversation.item.create", "item": ' + "[" * 5000, "invalid_request"),
    ('{"type": "session.update", "session": {"instructions": "\\ud800"}}', "invalid_request"),
]
EVENTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "response.think"}, "invalid_request"),
    ({"type": "response.cancel"}, "invalid_request"),
    ({"type": "conversation.item.create"}, "invalid_request"),
    ({"type": "conversation.item.create", "item": {"type": "function_call"}}, "unsupported"),
    ({"type": "conversation.item.delete", "item_id": "none"}, "invalid_request"),
    ({"type": "conversation.item.delete", "item_id": "a b"}, "invalid_request"),
    ({"type": "input_audio_buffer.commit"}, "invalid_media"),
    ({"type": "input_audio_buffer.append", "audio": "not base64!"}, "invalid_request"),
    ({"type": "session.update", "session": {"output_modalities": ["audio"]}}, "unsupported"),
    ({"type": "session.update", "session": {"tools": [{"type": "function"}]}}, "unsupported"),
    ({"type": "session.update", "session": {"model": "other"}}, "model_not_found"),
    ({"type": "session.update", "session": {"type": "transcription"}}, "unsupported"),
    ({"type": "session.update", "session": {"window": {"items": 0}}}, "invalid_request"),
    (
        {
            "type": "session.update",
            "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}},
        },
        "unsupported",
    ),
    ({"type": "response.create", "response": {"conversation": "none"}}, "unsupported"),
    ({"type": "response.create", "response": {"max_output_tokens": 0}}, "invalid_request"),
]


def _item(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    item = {"type": "message", "role": role, "content": list(parts)}
    return {"type": "conversation.item.create", "item": item}


EVENTS += [
    (_item(), "invalid_request"),
    (_item(text_part("x"), role="robot"), "invalid_request"),
    (_item(image_part(b"no image")), "unsupported_media"),
    (_item({"type": "input_image", "image_url": "http://127.0.0.1/x.png"}), "forbidden_url"),
    (_item({"type": "input_audio", "audio": "AAA="}), "unsupported_media"),
    (_item({"type": "input_audio", "audio": "AA=="}), "invalid_media"),
    (_item(image_part(PICTURE), role="assistant"), "invalid_request"),
    ({**_item(text_part("x")), "previous_item_id": "none"}, "invalid_request"),
    (_item(text_part("x" * 300_000)), "context_length_exceeded"),
    (_item(text_part("x" * 2_000_000)), "body_too_large"),
    (_item(image_part(bytes(9_000_000))), "arena_too_small"),
]


def test_wrong_events_are_answered_by_errors_and_the_socket_stays(address: str) -> None:
    async def main(live: Live) -> None:
        for text, code in HOSTILE:
            await live.send_text(text)
            error = (await live.until("error")).error
            assert error.code.startswith(code), (text[:80], error)
        for event, code in EVENTS:
            error = await live.refused(**event)
            assert error.code.startswith(code), (str(event)[:120], error)
        await live.add(text_part("still here?"))
        assert (await live.answer()).status == "completed"

    run(address, main)


def test_event_without_media_has_a_limit(address: str) -> None:
    """It was decoded at once, which kept all other clients waiting for a second."""

    async def main(live: Live) -> None:
        tools = "[]," * 400_000
        update = f'"type": "session.update", "session": {{"tools": [{tools}0]}}'
        await live.send_text(f"{{{update}}}")
        error = (await live.until("error")).error
        assert error.message == "the event has more than 1048576 bytes"
        await live.send_text(f'{{{update}, "type": "input_audio_buffer.append"}}')
        error = (await live.until("error")).error
        assert error.code == "invalid_request"
        assert "session.update" in error.message, "it was read as one, for a second"

    run(address, main)


def test_failure_of_the_engine_is_a_part_of_the_response(store_address: str) -> None:
    engine = ScriptedEngine([10], failure=EngineUnavailable("gone; try again"))

    async def main(live: Live) -> None:
        await live.add(text_part("one?"))
        response = await live.answer()
        assert response.status == "failed"
        error = response.status_details.error
        assert (error.code, error.retry_after) == ("engine_unavailable", 1)
        live.events.clear()
        await live.add(text_part("two?"))  # the answer that failed is no item
        assert live.events[0].previous_item_id is not None

    run(store_address, main, engine=engine)


def test_handshakes_without_a_key_or_for_another_model_are_refused(store_address: str) -> None:
    tenant = Tenant(name="a", api_keys=("key-of-tenant-a-0001",))

    async def serve() -> list[int]:
        statuses = []
        async with live_server(store_address, tenants=[tenant]) as url:
            for key, model, session_id in (
                ("wrong", "shapes", None),
                (tenant.api_keys[0], "other", None),
                (tenant.api_keys[0], "shapes", "sess_none"),
            ):
                with pytest.raises(InvalidStatus) as refusal:
                    async with connected(url, key=key, model=model, session_id=session_id):
                        pass
                statuses.append(refusal.value.response.status_code)
            protocols: Any = ["realtime", f"openai-insecure-api-key.{tenant.api_keys[0]}"]
            target = url.replace("http:", "ws:") + "/v1/realtime?model=shapes"
            async with connect(target, subprotocols=protocols) as browser:
                assert browser.subprotocol == "realtime"
                assert b"session.created" in await browser.recv(decode=False)
        return statuses

    assert asyncio.run(serve()) == [401, 404, 404]


def test_item_of_more_parts_than_are_allowed_is_refused_with_the_setting(address: str) -> None:
    async def main(live: Live) -> None:
        await live.add(*[text_part("a")] * 16)
        error = await live.refused(**_item(*[text_part("a")] * 17))
        assert (error.code, "(--max-parts)" in error.message) == ("invalid_request", True)

    run(address, main, max_parts=16)


# Back-pressure and memory


def test_item_beyond_those_in_preparation_is_refused_and_the_socket_stays(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker makes features here, so that all items stay in preparation."""
    monkeypatch.setattr(live_items, "MOST_PREPARING", 2)

    async def main(live: Live) -> None:
        for side in (32, 40):
            part = image_part(encoded(Image.new("RGB", (side, side)), "PNG"))
            await live.send(**_item(part))
        error = await live.refused(**_item(image_part(PICTURE)))
        assert (error.code, error.type, error.retry_after) == ("no_permit_left", "server_error", 1)

    run(store_address, main)


def test_window_of_seconds_bounds_a_session_of_hours(address: str) -> None:
    """The records do not grow with the frames, here 288 of 16 pictures, in virtual time."""
    clock = [1e9]
    pictures = [
        image_part(encoded(Image.new("RGB", (56, 56), (shade, 0, 0)), "PNG"))
        for shade in range(0, 256, 16)
    ]

    async def main(live: Live) -> None:
        await live.send(type="session.update", session={"window": {"seconds": 40}})
        sizes = []
        with DaemonStore(address, name="reader") as store:
            for minute in range(9):
                for frame in range(32):
                    clock[0] += 2.0
                    await live.send(**_item(pictures[frame % len(pictures)]))
                    await live.until("conversation.item.done")
                live.events.clear()
                if minute:
                    records = store.list_objects(ObjectKind.RECORDS, limit=4096)
                    sizes.append(sum(each.handle.nbytes for each in records))
        # Up to two chunks of changes, and those of the items in the window.
        assert max(sizes) <= 40_000, sizes

    run(address, main, now_s=lambda: clock[0])


# Sessions on several frontends


def test_session_is_continued_on_another_frontend_which_fences_the_first_one_off(
    address: str,
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([10], [11, 12])
        async with (
            live_server(address) as first_url,
            live_server(address, engine=engine) as url,
            connected(first_url) as first,
        ):
            await first.send(type="session.update", session={"instructions": "Be brief."})
            await first.until("session.updated")
            picture = await first.add(image_part(PICTURE))
            question = await first.add(text_part("What is it?"))
            async with connected(url, session_id=first.session_id) as second:
                session = second.created.session
                assert session.instructions == "Be brief."
                assert (session.conversation_items, session.last_item_id) == (2, question.id)
                assert (await second.answer()).status == "completed"
                await second.send(type="conversation.item.retrieve", item_id=picture.id)
                await second.until("conversation.item.retrieved")
                await first.send(**_item(text_part("mine?")))
                error = (await first.until("error")).error
                assert error.code == "session_continued"
                with pytest.raises(ConnectionClosed) as closed:
                    await first.until("conversation.item.done")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 4409
                await second.add(text_part("And now?"))
        assert len(engine.requests[0].items) == 1

    asyncio.run(main())


def test_session_of_another_tenant_is_unknown(store_address: str) -> None:
    tenants = [Tenant(name=name, api_keys=(f"key-of-tenant-{name}-0001",)) for name in "ab"]
    keys = [tenant.api_keys[0] for tenant in tenants]

    async def main() -> None:
        async with live_server(store_address, tenants=tenants) as url:
            async with connected(url, key=keys[0]) as live:
                await live.add(text_part("mine"))
            with pytest.raises(InvalidStatus):
                async with connected(url, key=keys[1], session_id=live.session_id):
                    pass
            async with connected(url, key=keys[0], session_id=live.session_id) as live:
                assert live.created.session.conversation_items == 1

    asyncio.run(main())


# Random sequences


@pytest.mark.parametrize("seed", range(4))
def test_generated_events_leave_the_conversation_of_a_model(address: str, seed: int) -> None:
    """The items that another connection continues with are those of a list."""
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def main() -> None:
        async with live_server(address, engine=ScriptedEngine([10], [11])) as url:
            session_id, items, window = None, [], None
            for _ in range(4):
                async with connected(url, session_id=session_id) as live:
                    session_id = live.session_id
                    assert live.created.session.conversation_items == len(items)
                    for _ in range(rng.choice((10, 60))):
                        window = await step(live, rng, items, window)
            assert session_id is not None
            store = await AsyncDaemonStore.connect(address, name="reader", writable=True)
            async with store:
                log = await LiveLog.resume(store, tenant="", session_id=session_id, lease="reader")
                assert [item.id for item in log.session] == items
                assert log.session.num_tokens == sum(item.num_tokens for item in log.session)
                await log.delete()

    asyncio.run(main())


async def step(live: Live, rng: random.Random, items: list[str], window: int | None) -> int | None:
    """Send one event, and do the same to the list; return the window, which may be new."""
    choice = rng.random()
    some = rng.choice(items) if items else None
    if choice < 0.5:
        previous = rng.choice((None, None, "root", some))
        part = rng.choice((text_part("word"), image_part(PICTURE), image_part(OTHER)))
        item = await live.add(part, previous_item_id=previous)
        at = len(items)
        if previous is not None:
            at = 0 if previous == "root" else items.index(previous) + 1
        items.insert(at, item.id)
    elif choice < 0.6 and some is not None:
        await live.send(type="conversation.item.delete", item_id=some)
        await live.until("conversation.item.deleted")
        items.remove(some)
    elif choice < 0.7:
        window = rng.choice((None, 5, 20))
        await live.send(type="session.update", session={"window": {"items": window}})
        await live.until("session.updated")
    elif choice < 0.85:
        response = await live.answer()
        items.append(response.output[0].id)
    else:
        error = await live.refused(type="conversation.item.delete", item_id="none")
        assert error.code == "invalid_request"
    if window is not None and len(items) > window:
        gone = len(items) - max(1, int(0.8 * window))
        for item_id in items[:gone]:
            assert (await live.until("conversation.item.deleted")).item_id == item_id
        del items[:gone]
    return window
