"""Acquisition of a request's objects: reserved, awaited, and failures raised."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from afferent.admission.gate import Gate
from afferent.errors import ArenaTooSmall, InternalError, Param, StoreFull
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.settle import settle
from afferent.store.protocol.items import Join, Queue, SealItem
from afferent.store.protocol.results import (
    Absent,
    Failed,
    Outcome,
    Pending,
    Scheduled,
    existing,
    spans_of,
)
from afferent.store.state.allocator import round_up
from afferent.store.state.region import Shares
from afferent.telemetry.trace import Trace
from afferent.types import ContentKey, Handle, Modality, ObjectKind, ReserveItem, decode

T = TypeVar("T")

_ARENA_SETTING = "--arena-nbytes"
_SHARE_SETTINGS = {
    ObjectKind.RAW: "--raw-share of --arena-nbytes",
    ObjectKind.EMBEDDINGS: "--embeddings-share of --arena-nbytes",
}


class Maker:
    """Has objects made, over one store."""

    def __init__(
        self, store: AsyncDaemonStore, gate: Gate, *, shares: Shares, timeout_s: float
    ) -> None:
        self._store, self._gate = store, gate
        self._shares, self._timeout_s = shares, timeout_s

    async def acquire(
        self,
        request_id: str,
        wanted: Sequence[Join | Queue],
        trace: Trace,
        *,
        room: Sequence[ReserveItem],
        in_turn: bool,
        may_wait: bool = True,
    ) -> list[Outcome]:
        """Pin existing objects, and queue jobs for the others, once there is space for all.

        The space is reserved in a fair queue, all or nothing; unused space is returned. Follow with
        `settle`.

        Args:
            room: Space for missing objects, and for pins on existing ones.
            in_turn: Wait at the concurrency limit too. No wait for bytes may follow: requests with
                bytes that wait for a permit would deadlock with it.
            may_wait: As for `Gate.admit`.

        Raises:
            ArenaTooSmall: The arena is too small for them.
            StoreFull: Too many requests wait for space.
            NoPermitLeft: Too many requests wait for a permit.
            DeadlineExceeded: It was not granted in time.
        """
        for kind in {item.kind for item in room}:
            self.check_share(kind, [item.nbytes for item in room if item.kind is kind])
        start_ns = time.monotonic_ns()
        with trace.at("admission"):
            await self._gate.admit(request_id, room, may_wait=may_wait)
            trace.stage(start_ns, "room_for_features")
            if in_turn and self._gate.is_counting:
                start_ns = time.monotonic_ns()
                await self._gate.enter(request_id)
                trace.stage(start_ns, "wait_for_a_permit")
        start_ns = time.monotonic_ns()
        outcomes = await self._store.acquire(request_id, wanted)
        if not all(isinstance(outcome, Scheduled) for outcome in outcomes):
            await self._store.unreserve(request_id, room)
        trace.stage(start_ns, "queue_jobs", note=summary(outcomes))
        if any(isinstance(outcome, Absent) for outcome in outcomes):
            raise StoreFull("features were evicted while this request waited for room; try again")
        return outcomes

    async def settle(
        self,
        request_id: str,
        item_keys: Sequence[ContentKey],
        outcomes: list[Outcome],
        trace: Trace,
        *,
        stage: str = "wait_for_features",
    ) -> list[Outcome]:
        """Wait until no outcome is pending, and return the outcomes."""
        num_pending = sum(isinstance(outcome, Pending) for outcome in outcomes)
        if not num_pending:
            return outcomes
        start_ns = time.monotonic_ns()
        settled = await settle(
            *(self._store, request_id, item_keys, outcomes), timeout_s=self._timeout_s
        )
        trace.stage(start_ns, stage, note=count(num_pending, "item"))
        for outcome in settled:
            trace.add(spans_of(outcome))
        return settled

    async def read_records(
        self,
        request_id: str,
        asked: Sequence[Queue],
        decoder: msgspec.msgpack.Decoder[T],
        trace: Trace,
        *,
        stage: str,
    ) -> list[T]:
        """Have workers make records, and return them; nothing stays pinned.

        Raises:
            AfferentError: A worker refused its job, or `acquire` fails.
        """
        room = [ReserveItem(item.kind, item.nbytes) for item in asked]
        outcomes = await self.acquire(request_id, asked, trace, room=room, in_turn=False)
        item_keys = [ContentKey(item.key) for item in asked]
        outcomes = await self.settle(request_id, item_keys, outcomes, trace, stage=stage)
        handles = [handle_of(outcome) for outcome in outcomes]
        blocks = [self._store.block(handle) for handle in handles]
        records = [decode(decoder, block) for block in blocks]
        del blocks
        await self._store.release(request_id, handles)
        return records

    def share_nbytes(self, kind: ObjectKind) -> int:
        """Return the bytes of the arena for objects of a kind."""
        return int(self._store.capacity_nbytes * self._shares[kind])

    def check_share(self, kind: ObjectKind, sizes: Sequence[int]) -> None:
        """Check that objects of these sizes fit into the kind's share.

        Raises:
            ArenaTooSmall: They do not.
        """
        needed = sum(map(round_up, sizes))
        share = self.share_nbytes(kind)
        if needed > share:
            setting = _SHARE_SETTINGS.get(kind, _ARENA_SETTING)
            raise ArenaTooSmall(
                f"the request's media take {needed} bytes as {kind}; "
                f"their share of the arena is {share} ({setting})",
                param=Param.MESSAGES,
            )


async def write_and_seal(
    store: AsyncDaemonStore,
    request_id: str,
    handles: Sequence[Handle],
    values: Sequence[bytes],
) -> list[Handle]:
    """Write bytes into objects that the request makes, and seal them; it has a pin on each.

    Args:
        values: Bytes of each object, at most as many as it has.

    Raises:
        Unavailable: Try again.
    """
    for handle, data in zip(handles, values, strict=True):
        block = np.frombuffer(store.block(handle), np.uint8)
        np.copyto(block[: len(data)], np.frombuffer(data, np.uint8))
    to_seal = [SealItem(handle, len(data)) for handle, data in zip(handles, values, strict=True)]
    return await store.seal(request_id, to_seal)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the number of each outcome, such as ``"3 hit, 1 absent"``."""
    counts = Counter(outcome.__struct_config__.tag for outcome in outcomes)
    return ", ".join(f"{count} {tag}" for tag, count in counts.items())


def handle_of(outcome: Outcome) -> Handle:
    """Return the handle of a made object, or raise its failure."""
    if isinstance(outcome, Failed):
        raise outcome.failure.error()
    handle = existing(outcome)
    if handle is None:
        raise InternalError("the store named no handle")
    return handle


def handle_if_there(outcome: Outcome) -> Handle | None:
    """Return the handle of an existing object; ``None`` if it is absent.

    Raises:
        StoreFull: It exists, but can't be pinned, as its space is reserved for others.
    """
    return None if isinstance(outcome, Absent) else handle_of(outcome)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``"2 images"``."""
    if noun == Modality.AUDIO:
        noun = "audio clip"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
