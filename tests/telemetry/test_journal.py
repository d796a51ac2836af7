"""The recent-requests buffer: running and ended requests, up to a limit."""

from __future__ import annotations

import msgspec

from afferent.telemetry.journal import KEPT, MAX_SPANS, Journal, RequestReport
from afferent.telemetry.trace import Trace
from afferent.types import Span


def trace(name: str, *, tenant: str = "", start_ns: int = 1000) -> Trace:
    return Trace(name, "POST /v1/chat/completions", start_ns=start_ns, tenant=tenant)


def test_a_request_runs_and_then_has_ended() -> None:
    journal, one = Journal(), trace("a", tenant="t")
    journal.begin(one)
    one.spans += [Span("worker", 2, "prefill", 30, 40), Span("frontend", 1, "digest", 10, 20)]
    one.items.append("1 image hit")
    (running,) = journal.running()
    assert (running.outcome, running.end_ns, running.items) == ("", 0, ["1 image hit"])
    assert [span.stage for span in running.spans] == ["digest", "prefill"]
    assert journal.num_by_tenant() == {"t": 1}
    journal.end(one, "ok")
    journal.end(one, "client_gone")
    (ended,) = journal.ended()
    assert (ended.outcome, ended.request_id, journal.running()) == ("ok", "a", [])
    assert ended.end_ns > ended.start_ns
    assert msgspec.json.decode(msgspec.json.encode(ended), type=RequestReport) == ended


def test_what_is_kept_is_limited() -> None:
    journal = Journal()
    for number in range(3 * KEPT):
        journal.begin(trace(f"running {number}", tenant=f"{number % 2}"))
    for number in range(2 * KEPT):
        one = trace(f"ended {number}")
        journal.begin(one)
        journal.end(one, "ok")
    assert (len(journal.running()), journal.num_running) == (KEPT, 3 * KEPT)
    assert journal.running()[0].request_id == "running 0"
    assert journal.num_by_tenant() == {"0": 3 * KEPT / 2, "1": 3 * KEPT / 2}
    assert [each.request_id for each in journal.ended()][-1] == f"ended {2 * KEPT - 1}"
    assert len(journal.ended()) == KEPT


def test_of_very_many_stages_the_longest_are_told_in_their_order() -> None:
    one = trace("a")
    one.spans += [Span("worker", 1, "decode", at, at + 1) for at in range(500)]
    one.spans.insert(250, Span("worker", 1, "encode", 250, 400))
    told = RequestReport.of(one)
    assert (len(told.spans), told.num_left_out) == (MAX_SPANS, 501 - MAX_SPANS)
    assert "encode" in {span.stage for span in told.spans}
    assert told.spans == sorted(told.spans, key=lambda span: (span.start_ns, span.end_ns))


def test_a_path_may_be_long_but_not_here() -> None:
    one = Trace("a", "GET /" + "x" * 60_000)
    assert len(RequestReport.of(one).what) < 200
