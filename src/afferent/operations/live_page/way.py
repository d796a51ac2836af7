"""Stages of the pipeline, with a few figures each. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from afferent.engines.protocol import EngineStats
from afferent.engines.upstream import UpstreamStats
from afferent.operations.live_page.figures import Change
from afferent.operations.live_page.observing import Observation

Unit = Literal["", "/s", "B", "B/s", "s", "%"]


class Figure(Struct, frozen=True):
    """One value; of a ``%`` it is a part of 1."""

    label: str
    value: float | None
    unit: Unit = ""


class Station(Struct, frozen=True, kw_only=True):
    """Stage of the pipeline; its first figure is the most important one.

    Attributes:
        state: ``waiting`` if something queues, else ``busy`` if any figure is above 0.
    """

    name: str
    state: Literal["idle", "busy", "waiting"]
    figures: list[Figure]


def stations(before: Observation, after: Observation, change: Change) -> list[Station]:
    """Return the stations in the order in which a request passes them."""
    return [
        _requests(after, change),
        _gate(after, change),
        _media(change),
        _preprocessing(after, change),
        _engine(before, after),
        _answers(change),
    ]


def _station(name: str, figures: list[Figure], *, num_waiting: float = 0) -> Station:
    is_busy = any(figure.value for figure in figures)
    return Station(
        name=name,
        state="waiting" if num_waiting else "busy" if is_busy else "idle",
        figures=figures,
    )


def _requests(after: Observation, change: Change) -> Station:
    ended = change.rate("afferent_requests_total")
    failed = ended - change.rate("afferent_requests_total", outcome="ok")
    return _station(
        "Requests",
        [
            Figure("ended", ended, "/s"),
            Figure("in flight", sum(each.num_running for each in after.frontends)),
            Figure("not ok", max(failed, 0.0), "/s"),
        ],
    )


def _gate(after: Observation, change: Change) -> Station:
    statistics, num_waiting = after.statistics, 0
    if statistics is not None:
        permits = sum(each.num_queued for each in statistics.permits.values())
        num_waiting = statistics.num_reservations_queued + permits
    return _station(
        "Gate",
        [
            Figure("waiting", num_waiting if statistics else None),
            Figure("wait p99", change.quantile(0.99, "afferent_admission_seconds"), "s"),
            Figure("sent away", change.rate("afferent_rejections_total", where="admission"), "/s"),
        ],
        num_waiting=num_waiting,
    )


def _media(change: Change) -> Station:
    items = change.rate("afferent_items_total")
    hits = change.rate("afferent_items_total", outcome="hit")
    return _station(
        "Media",
        [
            Figure("items", items, "/s"),
            Figure("found", hits / items if items else None, "%"),
            Figure("arriving", change.rate("afferent_media_bytes_total"), "B/s"),
            Figure("copied", change.rate("afferent_copied_bytes_total"), "B/s"),
        ],
    )


def _preprocessing(after: Observation, change: Change) -> Station:
    statistics = after.statistics
    queued = statistics.num_jobs_queued if statistics else None
    return _station(
        "Preprocessing",
        [
            Figure("made", change.rate("afferent_items_total", outcome="made"), "/s"),
            Figure("running", statistics.num_jobs_running if statistics else None),
            Figure("queued", queued),
            Figure(
                "decode p50", change.quantile(0.5, "afferent_stage_seconds", stage="decode"), "s"
            ),
        ],
        num_waiting=queued or 0,
    )


def _engine(before: Observation, after: Observation) -> Station:
    old, new = _stats(before), _stats(after)
    elapsed_s = max(after.taken_s - before.taken_s, 1e-9)
    waiting = new.num_waiting if new else None
    figures = [Figure("running", new.num_running if new else None), Figure("waiting", waiting)]
    if isinstance(new, UpstreamStats):
        last = old if isinstance(old, UpstreamStats) else new
        tokens = max(new.num_tokens - last.num_tokens, 0) / elapsed_s
        figures += [Figure("KV in use", new.kv_in_use, "%"), Figure("tokens", tokens, "/s")]
    else:
        encoded = steps = None
        if isinstance(old, EngineStats) and new is not None and old.num_steps <= new.num_steps:
            encoded = max(sum(new.num_encoded) - sum(old.num_encoded), 0) / elapsed_s
            steps = (new.num_steps - old.num_steps) / elapsed_s
        figures += [Figure("encoded", encoded, "/s"), Figure("steps", steps, "/s")]
    return _station("Engine", figures, num_waiting=waiting or 0)


def _stats(seen: Observation) -> EngineStats | UpstreamStats | None:
    found = (each.engine or each.upstream for each in seen.frontends)
    return next((stats for stats in found if stats is not None), None)


def _answers(change: Change) -> Station:
    ttft, itl = "afferent_time_to_first_token_seconds", "afferent_inter_token_seconds"
    return _station(
        "Answers",
        [
            Figure("tokens", change.rate("afferent_tokens_total", kind="completion"), "/s"),
            Figure("TTFT p50", change.quantile(0.5, ttft), "s"),
            Figure("TTFT p99", change.quantile(0.99, ttft), "s"),
            Figure("ITL p50", change.quantile(0.5, itl), "s"),
        ],
    )
