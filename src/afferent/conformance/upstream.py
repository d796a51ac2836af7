"""Conformance checks of the promises of `afferent.engines.upstream`, for authors of upstreams.

`CHECKS_OF_UPSTREAMS` names them. With pytest, for example:

    @pytest.mark.parametrize("name", CHECKS_OF_UPSTREAMS)
    def test_my_upstream(name: str) -> None:
        asyncio.run(check_upstream(name, subject))

``subject`` is an `UpstreamSubject`: the description of the upstream, and items with known answers.
A check starts the upstream's processes beside a store of its own, and ends them. A broken promise
raises `NotConforming`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from afferent.conformance.engine_trial import NotConforming
from afferent.engines.contract import Caller, EngineSite, UpstreamKind
from afferent.engines.references import FeaturesReference, Reference, verify
from afferent.engines.upstream import Upstream, UpstreamRequest
from afferent.errors import EngineUnavailable, FormatError
from afferent.runtime.process import Child, LogSettings, spawn
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import SealItem
from afferent.types import ContentKey, CreateItem, Handle, MiB, Modality, ObjectKind

_ARENA_NBYTES = 64 * MiB
_SHARES = {ObjectKind.FEATURES: 0.5, ObjectKind.RAW: 0.25, ObjectKind.EMBEDDINGS: 0.25}
_LOOK_AGAIN_S = 0.02
_VALID_S = 60.0
_ERRORS = 400

_Condition = Callable[[], bool | Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamItem:
    """Image with a known answer.

    Attributes:
        features: Its features, as they are in the arena.
        marker: The token that the chat template writes for the item.
        embed: The token that stands for each row of embeddings.
        num_rows: Number of rows of embeddings.
        answer: Part of the body of the answer to a request with this item alone.
        small: Features that are needed for positions, such as ``image_grid_thw``.
    """

    features: codec.Tree
    marker: int
    embed: int
    num_rows: int
    answer: bytes
    small: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSubject:
    """Upstream under test.

    Attributes:
        kind: Its description.
        settings: Its settings.
        model_folder: Folder of the model.
        item: Returns different items for different numbers.
        request: Returns a request with the references of items, given as URLs.
        start_timeout_s: Time within which it takes requests.
        settle_s: Time within which it releases its pins, and within which its end is noticed.
    """

    kind: UpstreamKind[Any, Any]
    settings: Any
    model_folder: Path
    item: Callable[[int], UpstreamItem]
    request: Callable[[Sequence[str]], UpstreamRequest]
    start_timeout_s: float = 600.0
    settle_s: float = 30.0


async def check_upstream(name: str, subject: UpstreamSubject) -> None:
    """Run one of `CHECKS_OF_UPSTREAMS`.

    Raises:
        NotConforming: The upstream does not keep that promise.
    """
    async with _running(subject) as trial:
        await CHECKS_OF_UPSTREAMS[name](trial)


class _Trial:
    """Driver of a running upstream, in the role of a frontend."""

    def __init__(
        self,
        subject: UpstreamSubject,
        store: AsyncDaemonStore,
        upstream: Upstream,
        other: Upstream,
        children: Sequence[Child],
    ) -> None:
        self.subject, self.store = subject, store
        self.upstream, self.other = upstream, other
        self.children = children
        self._numbers = itertools.count()

    async def reference(self, number: int, *, valid_s: float = _VALID_S) -> FeaturesReference:
        """Put an item's features into the store, pinned by ``features-N``, and refer to them."""
        item, key = self.subject.item(number), ContentKey(secrets.token_bytes(32))
        request = f"features-{number}"
        nbytes = codec.plan(item.features).nbytes
        (block,) = await self.store.create(
            request, [CreateItem(ObjectKind.FEATURES, nbytes, bytes(key))]
        )
        used = codec.write_into(item.features, self.store.block(block))
        (handle,) = await self.store.seal(request, [SealItem(block, used)])
        return FeaturesReference(
            modality=Modality.IMAGE,
            key=bytes(key),
            handle=handle,
            marker=(item.marker,),
            embed=item.embed,
            prompt=((item.embed, item.num_rows),),
            small=item.small,
            expires_s=time.time() + valid_s,
        )

    async def ask(self, *references: Reference | str) -> tuple[int, bytes]:
        """Return status and body of the answer to a request with these items."""
        urls = [each if isinstance(each, str) else self.upstream.sign(each) for each in references]
        async with self.upstream.forward(self.subject.request(urls)) as answer:
            return answer.status, b"".join([chunk async for chunk in answer.chunks])

    async def until(self, holds: _Condition, promise: str) -> None:
        """Wait until a condition holds, at most `UpstreamSubject.settle_s`."""
        await _until(holds, promise, timeout_s=self.subject.settle_s)

    async def holds_nothing(self) -> bool:
        statistics = await self.store.stat()
        return statistics.held_nbytes == 0


async def _until(holds: _Condition, promise: str, *, timeout_s: float) -> None:
    """Wait until a condition holds.

    Raises:
        NotConforming: It does not hold in time.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                found = holds()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)
    raise NotConforming(promise)


@asynccontextmanager
async def _running(subject: UpstreamSubject) -> AsyncIterator[_Trial]:
    kind = subject.kind
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(StoreServer(_ARENA_NBYTES, shares=_SHARES))
        site = EngineSite(
            model_folder=subject.model_folder,
            model_name="model",
            family=None,
            store_address=server.address,
            shares=_SHARES,
            left_nbytes=0,
        )
        kind.check(subject.model_folder, subject.settings)
        plan = kind.plan(site, subject.settings)
        for path in plan.files:
            stack.callback(path.unlink, missing_ok=True)
        children = []
        for process in plan.processes:
            child = spawn(
                *(process.name, process.module, process.settings),
                log=LogSettings(level="warning", format="text"),
                fds=process.fds,
                env=dict(process.env),
            )
            stack.callback(child.discard)
            children.append(child)
        store = await AsyncDaemonStore.connect(server.address, name="trial", writable=True)
        stack.push_async_callback(store.close)
        sent = msgspec.msgpack.encode(plan.link)  # as a frontend gets it, in another process
        link = msgspec.msgpack.decode(sent, type=kind.link_type)
        connected = [
            await stack.enter_async_context(
                kind.connect(link, Caller(name=name, store_address=server.address))
            )
            for name in ("one", "two")
        ]
        trial = _Trial(subject, store, connected[0], connected[1], children)
        for each in connected:
            await _until(
                lambda upstream=each: upstream.is_ready,  # type: ignore[misc]
                "it takes requests within its start timeout",
                timeout_s=subject.start_timeout_s,
            )
        yield trial


async def _answers_right(trial: _Trial) -> None:
    """Check the answers to requests with one item each, and with two."""
    for number in range(3):
        status, body = await trial.ask(await trial.reference(number))
        _require_answer(status, body, trial.subject.item(number).answer)
    both = [await trial.reference(number) for number in (3, 4)]
    status, body = await trial.ask(*both)
    if status >= _ERRORS:
        raise NotConforming(f"it takes several items; it answered {status}: {body[:200]!r}")


async def _releases_its_pins(trial: _Trial) -> None:
    """Check that nothing is pinned after an answer."""
    status, body = await trial.ask(await trial.reference(0))
    _require_answer(status, body, trial.subject.item(0).answer)
    trial.store.forget("features-0")
    await trial.until(trial.holds_nothing, "it releases its pins at the end of a request")


async def _stops_when_it_is_left(trial: _Trial) -> None:
    """Check that a request that is left early holds nothing, and that others are answered."""
    url = trial.upstream.sign(await trial.reference(0))
    async with trial.upstream.forward(trial.subject.request([url])):
        pass  # no part of the answer is read
    trial.store.forget("features-0")
    await trial.until(trial.holds_nothing, "it releases the pins of a request that is left early")
    status, body = await trial.ask(await trial.reference(1))
    _require_answer(status, body, trial.subject.item(1).answer)


async def _refuses_forged_references(trial: _Trial) -> None:
    """Check that a reference with another signature is refused: a client could write it."""
    url = trial.upstream.sign(await trial.reference(0))
    middle = len(url) // 2
    changed = "A" if url[middle] != "A" else "B"
    for forged in (url[:middle] + changed + url[middle + 1 :], url[: middle * 2 - 8]):
        await _require_refusal(trial, forged, "it refuses references that were not made here")


async def _refuses_expired_references(trial: _Trial) -> None:
    expired = await trial.reference(0, valid_s=-1.0)
    await _require_refusal(trial, expired, "it refuses references that have expired")


async def _does_not_answer_from_lost_features(trial: _Trial) -> None:
    """Check that it refuses a reference to an object of an earlier life of the store."""
    reference = await trial.reference(0)
    there = reference.handle
    gone = Handle(there.segment, there.offset, there.nbytes, there.generation + 1)
    lost = msgspec.structs.replace(reference, key=secrets.token_bytes(32), handle=gone)
    status, body = await trial.ask(lost)
    if status < _ERRORS and trial.subject.item(0).answer in body:
        raise NotConforming("it does not answer from another object than the reference names")


async def _signs_alike_in_all_frontends(trial: _Trial) -> None:
    """Check that one frontend's references and salts are those of every other frontend."""
    reference = await trial.reference(0)
    if trial.upstream.sign(reference) != trial.other.sign(reference):
        raise NotConforming("all frontends sign with the same secret")
    if trial.upstream.salt_key != trial.other.salt_key or len(trial.upstream.salt_key) < 16:
        raise NotConforming("all frontends have the same salt key, of 16 bytes or more")
    try:
        verify(trial.upstream.sign(reference), trial.upstream.salt_key)
    except FormatError:
        return
    raise NotConforming("the salt key does not sign references")


async def _reports(trial: _Trial) -> None:
    """Check the types of metrics and statistics."""
    await trial.ask(await trial.reference(0))
    for name, page in await trial.upstream.metrics():
        if not isinstance(name, str) or not isinstance(page, bytes):
            raise NotConforming("metrics are pages by the name of their server")
    statistics = await trial.upstream.stats()
    if statistics is not None and statistics.num_running < 0:
        raise NotConforming("statistics are numbers of requests")


async def _says_when_it_is_unavailable(trial: _Trial) -> None:
    """Check that requests fail with a retryable error when its processes are gone."""
    if not trial.children:
        return  # it runs elsewhere
    for child in trial.children:
        os.kill(child.pid, 9)
        child.popen.wait()
    await trial.until(lambda: not trial.upstream.is_ready, "it is not ready without its processes")
    try:
        await trial.ask(await trial.reference(0))
    except EngineUnavailable:
        return
    raise NotConforming("`forward` raises EngineUnavailable while it does not run")


CHECKS_OF_UPSTREAMS: dict[str, Callable[[_Trial], Awaitable[None]]] = {
    check.__name__[1:]: check
    for check in (
        _answers_right,
        _releases_its_pins,
        _stops_when_it_is_left,
        _refuses_forged_references,
        _refuses_expired_references,
        _does_not_answer_from_lost_features,
        _signs_alike_in_all_frontends,
        _reports,
        _says_when_it_is_unavailable,
    )
}


def _require_answer(status: int, body: bytes, expected: bytes) -> None:
    if status >= _ERRORS or expected not in body:
        raise NotConforming(
            f"it answers from the features: {expected!r} is not in {status} {body[:200]!r}"
        )


async def _require_refusal(trial: _Trial, item: Reference | str, promise: str) -> None:
    try:
        status, body = await trial.ask(item)
    except EngineUnavailable as error:
        raise NotConforming(f"{promise}, and goes on") from error
    if status < _ERRORS:
        raise NotConforming(f"{promise}; it answered {status}: {body[:200]!r}")
