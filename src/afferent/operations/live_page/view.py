"""View of a server for the page and ``afferent top``, computed from two snapshots. Pure.

Values are bytes, seconds, parts of 1, and events a second; a missing value is ``None``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from afferent.operations.live_page.figures import Change
from afferent.operations.live_page.observing import Observation
from afferent.operations.live_page.savings import Savings, savings
from afferent.operations.live_page.way import Station, stations
from afferent.proxy.reports import FrontendReport
from afferent.store.protocol.results import ClientInfo, ObjectInfo
from afferent.telemetry.journal import KEPT, RequestReport
from afferent.types import Span

_KEY_DIGITS = 12
_THE_STORE = 0
"""The client id of the store itself."""


class Kind(Struct, frozen=True, kw_only=True):
    """Region of one kind in the arena: pinned, evictable and free bytes are all of it."""

    kind: str
    capacity_nbytes: int
    backed_nbytes: int
    pinned_nbytes: int
    evictable_nbytes: int
    free_nbytes: int
    reserved_nbytes: int
    num_objects: int
    num_pinned: int
    evicted_per_s: float


class Tenant(Struct, frozen=True, kw_only=True):
    """Tenant; ``share`` is its part of scarce resources, while all listed tenants use some."""

    name: str
    share: float
    num_running: int
    num_waiting: int
    queued_nbytes: int
    reserved_nbytes: int
    num_jobs: int


class Gate(Struct, frozen=True, kw_only=True):
    """Requests that wait for bytes or for a permit."""

    num_waiting_for_room: int
    num_waiting_for_permits: int
    tenants: list[Tenant]


class Stage(Struct, frozen=True, kw_only=True):
    """Stage of a request; ``start_s`` counts from the request's arrival."""

    process: str
    stage: str
    start_s: float
    seconds: float
    copied_nbytes: int
    note: str


class Request(Struct, frozen=True, kw_only=True):
    """Request; while it runs, ``outcome`` is empty and ``seconds`` is its time so far."""

    id: str
    process: str
    what: str
    tenant: str
    media: str
    where: str
    outcome: str
    seconds: float
    ended_s_ago: float
    items: list[str]
    num_prompt_tokens: int
    num_answer_tokens: int
    copied_nbytes: int
    stages: list[Stage]
    num_left_out: int


class Item(Struct, frozen=True, kw_only=True):
    """One of the largest objects in the arena; ``key`` is a prefix that identifies it."""

    key: str
    kind: str
    state: str
    nbytes: int
    held_by: list[str]


class Process(Struct, frozen=True, kw_only=True):
    """Client of the store, connected, or disconnected with pins that remain."""

    name: str
    pid: int
    is_connected: bool
    num_held: int
    held_nbytes: int
    reserved_nbytes: int


class View(Struct, frozen=True, kw_only=True):
    """View of a server; ``problem`` tells why a part is missing, and is empty otherwise."""

    taken_at: float
    over_s: float
    model: str
    num_frontends: int
    problem: Literal["", "no frontend answers", "the store does not answer"]
    way: list[Station]
    hit_rate: float | None
    savings: Savings
    kinds: list[Kind]
    gate: Gate
    num_running: int
    running: list[Request]
    ended: list[Request]
    num_objects: int
    items: list[Item]
    processes: list[Process]


def earliest(seen: Sequence[Observation]) -> Observation:
    """Return the first snapshot with counts: after one without, all counts would look new."""
    return next((each for each in seen if each.readings), seen[0])


def view(before: Observation, after: Observation) -> View:
    """Return the view at the time of ``after``; rates are since ``before``."""
    old, new = before.statistics, after.statistics
    if old is not None and new is not None and old.segment != new.segment:
        before = after  # the counts of both can't be compared: the rates are unknown
    over_s = after.taken_s - before.taken_s
    change = Change(before.readings, after.readings, elapsed_s=over_s)
    frontends, statistics = after.frontends, after.statistics
    problem: Literal["", "no frontend answers", "the store does not answer"] = ""
    if not frontends:
        problem = "no frontend answers"
    elif statistics is None:
        problem = "the store does not answer"
    hits = change.rate("afferent_items_total", outcome="hit")
    asked = change.rate("afferent_items_total")
    return View(
        taken_at=time.time(),
        over_s=over_s,
        model=frontends[0].model_name if frontends else "",
        num_frontends=len(frontends),
        problem=problem,
        way=stations(before, after, change),
        hit_rate=hits / asked if asked else None,
        savings=savings(change),
        kinds=_kinds(before, after),
        gate=_gate(after),
        num_running=sum(each.num_running for each in frontends),
        running=_requests(frontends, are_running=True),
        ended=_requests(frontends, are_running=False),
        num_objects=statistics.num_objects if statistics else 0,
        items=_items(after.lists.objects, after.lists.clients),
        processes=[_process(client) for client in after.lists.clients],
    )


def _kinds(before: Observation, after: Observation) -> list[Kind]:
    old, new = before.statistics, after.statistics
    if new is None:
        return []
    is_same = old is not None and old.segment == new.segment
    elapsed_s = max(after.taken_s - before.taken_s, 1e-9)
    found = []
    for kind, share in new.kinds.items():
        evicted = share.num_evicted - (old.kinds[kind].num_evicted if old and is_same else 0)
        found.append(
            Kind(
                kind=kind.value,
                capacity_nbytes=share.capacity_nbytes,
                backed_nbytes=share.backed_nbytes,
                pinned_nbytes=share.held_nbytes,
                evictable_nbytes=share.used_nbytes - share.held_nbytes,
                free_nbytes=share.capacity_nbytes - share.used_nbytes,
                reserved_nbytes=share.reserved_nbytes,
                num_objects=share.num_objects,
                num_pinned=share.num_held,
                evicted_per_s=evicted / elapsed_s if is_same else 0.0,
            )
        )
    return found


def _gate(seen: Observation) -> Gate:
    running: dict[str, int] = {}
    for report in seen.frontends:
        for tenant, number in report.num_by_tenant.items():
            running[tenant] = running.get(tenant, 0) + number
    known = {info.tenant: info for info in seen.tenants}
    names = sorted(running.keys() | known.keys())
    weights = {name: known[name].weight if name in known else 1.0 for name in names}
    tenants = []
    for name in names:
        info = known.get(name)
        tenants.append(
            Tenant(
                name=name,
                share=weights[name] / sum(weights.values()),
                num_running=running.get(name, 0),
                num_waiting=info.num_reservations_queued + info.num_permits_queued if info else 0,
                queued_nbytes=info.queued_nbytes if info else 0,
                reserved_nbytes=info.reserved_nbytes if info else 0,
                num_jobs=info.num_jobs if info else 0,
            )
        )
    statistics = seen.statistics
    permits = statistics.permits.values() if statistics else ()
    return Gate(
        num_waiting_for_room=statistics.num_reservations_queued if statistics else 0,
        num_waiting_for_permits=sum(each.num_queued for each in permits),
        tenants=tenants,
    )


def _requests(frontends: Sequence[FrontendReport], *, are_running: bool) -> list[Request]:
    """Return running requests, the oldest first, or ended ones, the latest first."""
    found = [
        (request, report)
        for report in frontends
        for request in (report.running if are_running else report.ended)
    ]
    found.sort(key=lambda pair: pair[0].start_ns if are_running else -pair[0].end_ns)
    return [_request(request, report) for request, report in found[:KEPT]]


def _request(request: RequestReport, report: FrontendReport) -> Request:
    end_ns = request.end_ns or report.taken_ns
    return Request(
        id=request.request_id,
        process=f"{report.process} {report.pid}",
        what=request.what,
        tenant=request.tenant,
        media=request.media,
        where=request.where,
        outcome=request.outcome,
        seconds=(end_ns - request.start_ns) / 1e9,
        ended_s_ago=(report.taken_ns - end_ns) / 1e9,
        items=request.items,
        num_prompt_tokens=request.num_prompt_tokens,
        num_answer_tokens=request.num_answer_tokens,
        copied_nbytes=sum(span.copied_nbytes for span in request.spans),
        stages=[_stage(span, request.start_ns) for span in request.spans],
        num_left_out=request.num_left_out,
    )


def _stage(span: Span, start_ns: int) -> Stage:
    return Stage(
        process=f"{span.process} {span.pid}",
        stage=span.stage.replace("_", " "),
        start_s=(span.start_ns - start_ns) / 1e9,
        seconds=(span.end_ns - span.start_ns) / 1e9,
        copied_nbytes=span.copied_nbytes,
        note=span.note,
    )


def _items(objects: Sequence[ObjectInfo], clients: Sequence[ClientInfo]) -> list[Item]:
    names = {client.client: f"{client.name} {client.pid}" for client in clients}
    return [
        Item(
            key=found.key.hex()[:_KEY_DIGITS] if found.key is not None else "",
            kind=found.kind.value,
            state=found.state.replace("_", " "),
            nbytes=found.handle.nbytes,
            held_by=_holders(found, names),
        )
        for found in objects
    ]


def _holders(found: ObjectInfo, names: Mapping[int, str]) -> list[str]:
    numbers = [*([] if found.writer is None else [found.writer]), *found.pins]
    return [
        "the store" if number == _THE_STORE else names.get(number, f"client {number}")
        for number in dict.fromkeys(numbers)
    ]


def _process(client: ClientInfo) -> Process:
    return Process(
        name=client.name,
        pid=client.pid,
        is_connected=client.connected,
        num_held=client.num_held,
        held_nbytes=client.held_nbytes,
        reserved_nbytes=client.reserved_nbytes,
    )
