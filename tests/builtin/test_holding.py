"""A request releases everything at its end, after a failure or a cancellation at any await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import httpx2 as httpx
import numpy as np
import pytest

from afferent.admission.permits import PermitStatistics
from afferent.engines.protocol import EngineEvent, EngineRequest
from afferent.errors import StoreUnavailable
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Failure, ObjectKind
from tests.builtin.frontends import WordEngine, frontend, post
from tests.images import encoded, photo
from tests.server import ask, data_url, wait_until

How = Literal["fails", "fails after", "cancelled", "cancelled after"]


@pytest.fixture
def watcher(address: str) -> Iterator[DaemonStore]:
    with DaemonStore(address, name="watcher") as store:
        yield store


@pytest.fixture
def watcher_of_jobs(store_address: str) -> Iterator[DaemonStore]:
    with DaemonStore(store_address, name="watcher", writable=True) as store:
        yield store


def places(store: DaemonStore) -> tuple[int, int]:
    """Return the held and the queued permits of the semaphore for preprocessing."""
    slots = store.stat().permits.get("preprocess", PermitStatistics(0, 0))
    return slots.num_held, slots.num_queued


class Saboteur:
    """A store whose ``at``-th awaited call fails or is cancelled, before or after the real call."""

    def __init__(self, store: AsyncDaemonStore, at: int, how: How) -> None:
        self._store, self._at, self._how = store, at, how
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not callable(real) or name in (
            "block",
            "forget",
            "discard",
            "introduce",
            "release_permit",
        ):
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 != self._at:
                return await real(*args, **kwargs)
            if self._how.endswith("after"):
                await real(*args, **kwargs)
            if self._how.startswith("fails"):
                raise StoreUnavailable("sabotage")
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return await asyncio.sleep(10)

        return call


def request(number: int) -> dict[str, Any]:
    """Return a request for a large image, twice, and a small one with a media id.

    Large images are received into the arena, small ones onto the heap.
    """
    large = encoded(photo(500, 400, seed=2 * number), "PNG")
    small = encoded(photo(60, 50, seed=2 * number + 1), "JPEG")
    assert len(large) > 390_000
    body = ask([data_url(large, "png"), data_url(small), data_url(large, "png")], "What?")
    body["messages"][0]["content"][1]["uuid"] = f"small-{number}"
    return body


def holds_nothing(watcher: DaemonStore) -> bool:
    figures = watcher.stat()
    return (
        figures.held_nbytes == 0
        and figures.reserved_nbytes == 0
        and figures.num_reservations_queued == 0
        and figures.num_jobs_queued == 0
        and figures.permits == {}
    )


@pytest.mark.parametrize("how", ["fails", "fails after", "cancelled", "cancelled after"])
def test_a_disturbance_at_every_await(address: str, watcher: DaemonStore, how: How) -> None:
    seed = {"fails": 0, "fails after": 100, "cancelled": 200, "cancelled after": 300}[how]
    seen: set[str] = set()

    async def attempt(at: int) -> bool:
        """Disturb the ``at``-th call of a request; return whether there was one."""
        saboteur: Saboteur | None = None

        def wrap(store: AsyncDaemonStore) -> Saboteur:
            nonlocal saboteur
            saboteur = Saboteur(store, at, how)
            return saboteur

        async with frontend(address, wrap=wrap, max_concurrency=1) as client:
            body = request(seed + at)
            if how.startswith("fails"):
                answer: Any = await post(client, body)
            else:
                (answer,) = await asyncio.gather(post(client, body), return_exceptions=True)
            assert saboteur is not None
            was_disturbed = len(saboteur.calls) > at
            if was_disturbed:
                seen.add(saboteur.calls[at])
                if how.startswith("fails"):
                    assert answer.status_code == 503, answer.text
            else:
                assert answer.status_code == 200, answer.text
            # The frontend still runs: the end of the request must release everything.
            await asyncio.to_thread(wait_until, lambda: holds_nothing(watcher))
        return was_disturbed

    at = 0
    while asyncio.run(attempt(at)):
        at += 1
    assert at >= 8
    assert {"reserve", "acquire_permit", "create", "seal", "acquire", "wait", "release"} <= seen


def test_how_often_the_store_is_asked(address: str) -> None:
    """The number of calls does not depend on the number of items."""
    saboteurs: list[Saboteur] = []

    def wrap(store: AsyncDaemonStore) -> Saboteur:
        saboteurs.append(Saboteur(store, -1, "fails"))
        return saboteurs[-1]

    async def main() -> list[list[str]]:
        asked = []
        async with frontend(address, wrap=wrap) as client:
            known = request(5000)
            some = ask([part["image_url"]["url"] for part in _images(known)], "What?")
            some["messages"][0]["content"] += _images(request(5001))[:1]
            for body in (known, known, some):
                saboteurs[-1].calls.clear()
                assert (await post(client, body)).status_code == 200
                asked.append(list(saboteurs[-1].calls))
        return asked

    miss, hit, mixed = asyncio.run(main())
    # In an arena as small as this one, the body counts as large.
    received, names = ["acquire_permit", "create", "acquire"], ["acquire", "seal", "release"]
    made = ["seal", "reserve", "acquire", "wait", "release"]
    assert miss == [*received, "acquire", *made, *names]
    assert hit == [*received, "release", "acquire"]
    some_made = ["seal", "release", "reserve", "acquire", "unreserve", "wait", "release"]
    assert mixed == [*received, *some_made]


def _images(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]


@pytest.mark.parametrize("max_concurrency", [0, 2])
def test_requests_side_by_side_through_a_small_arena(
    address: str, watcher: DaemonStore, max_concurrency: int
) -> None:
    """Requests that together need more than the arena are all served in turn."""
    rng, before = np.random.default_rng(0), watcher.stat().num_misses
    numbers = rng.integers(0, 12, 40).tolist()

    async def main() -> list[httpx.Response]:
        async with frontend(
            address, max_concurrency=max_concurrency, admission_timeout_s=60
        ) as client:
            bodies = {number: request(1000 + number) for number in set(numbers)}
            return await asyncio.gather(*(post(client, bodies[number]) for number in numbers))

    responses = asyncio.run(main())
    assert [response.status_code for response in responses] == [200] * 40
    assert watcher.stat().num_misses - before <= 3 * 12  # two images and a media id
    wait_until(lambda: holds_nothing(watcher))


def test_the_place_of_a_client_that_left_is_free_when_its_job_has_ended(
    store_address: str, watcher_of_jobs: DaemonStore
) -> None:
    """The next request waits until the worker has finished the job of the client that left."""

    async def main() -> None:
        async with frontend(store_address, max_concurrency=1) as client:
            leaves = asyncio.create_task(post(client, request(2000)))
            order = await asyncio.to_thread(watcher_of_jobs.take)
            waits = asyncio.create_task(post(client, request(2001)))
            await asyncio.to_thread(wait_until, lambda: places(watcher_of_jobs) == (1, 1))
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: watcher_of_jobs.stat().num_jobs_queued == 0)
            assert places(watcher_of_jobs) == (1, 1)
            watcher_of_jobs.finish(order, failure=Failure("invalid_media", "no"))
            await asyncio.to_thread(wait_until, lambda: places(watcher_of_jobs) == (1, 0))
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: holds_nothing(watcher_of_jobs))

    asyncio.run(main())


class SlowEngine(WordEngine):
    """An engine that accepts when `go_on` is set."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.asked.set()
        await self.go_on.wait()
        async for event in super().submit(request):
            yield event


@pytest.mark.parametrize("is_hit", [False, True])
def test_what_was_received_is_let_go_before_the_engine_is_asked(
    address: str, watcher: DaemonStore, is_hit: bool
) -> None:
    def held_nbytes(kind: ObjectKind) -> int:
        return watcher.stat().kinds[kind].held_nbytes

    async def main() -> None:
        engine = SlowEngine()
        async with frontend(address, engine=engine) as client:
            if is_hit:
                engine.go_on.set()
                assert (await post(client, request(4001))).status_code == 200
                engine.asked.clear()
                engine.go_on.clear()
            asked = asyncio.create_task(post(client, request(4000 + is_hit)))
            await engine.asked.wait()
            await asyncio.to_thread(wait_until, lambda: held_nbytes(ObjectKind.RAW) == 0)
            assert held_nbytes(ObjectKind.FEATURES) > 0
            engine.go_on.set()
            assert (await asked).status_code == 200

    asyncio.run(main())
    wait_until(lambda: holds_nothing(watcher))


def test_hits_and_text_pass_the_count_gate(address: str, watcher: DaemonStore) -> None:
    async def main() -> None:
        async with frontend(address, max_concurrency=1, admission_timeout_s=2.0) as client:
            assert (await post(client, request(3000))).status_code == 200
            watcher.acquire_permit("somebody", "preprocess", limit=1)
            for body in (request(3000), ask([], "What?")):
                assert (await post(client, body)).status_code == 200
            late = await post(client, request(3001))
            assert late.status_code == 503
            assert late.json()["error"]["code"] == "deadline_exceeded"
            assert int(late.headers["retry-after"]) >= 1
            watcher.release_permit("somebody", "preprocess")
            assert (await post(client, request(3001))).status_code == 200

    asyncio.run(main())
    wait_until(lambda: holds_nothing(watcher))
