"""The view of two observations: rates, quantiles, the arena, the gate, and requests in order."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from afferent.admission.permits import PermitStatistics
from afferent.engines.protocol import EngineStats
from afferent.engines.upstream import UpstreamStats
from afferent.operations.commands.top_frame import frame, show
from afferent.operations.live_page.figures import Change
from afferent.operations.live_page.observing import Lists, Observation
from afferent.operations.live_page.view import View, earliest, view
from afferent.operations.live_page.way import Station
from afferent.store.protocol.results import ClientInfo, ObjectInfo, TenantInfo
from afferent.telemetry.journal import KEPT
from afferent.telemetry.registry import Registry
from afferent.types import Handle, MiB, ObjectKind
from tests.operations.seen import journal, observation, report, statistics


def metrics(*, hits: int, made: int, waits: list[float]) -> Registry:
    found = Registry()
    items = found.counter("afferent_items_total", "", modality=("image",), outcome=("hit", "made"))
    items.labels("image", "hit").inc(hits)
    items.labels("image", "made").inc(made)
    seconds = found.histogram("afferent_admission_seconds", "", (0.1, 0.2, 0.4))
    for wait in waits:
        seconds.labels().observe(wait)
    return found


def made_metrics(
    *, hits: int, seconds: list[float], copied: int, unmade: int = 0, media: str = "image"
) -> Registry:
    """Return metrics of jobs with the seconds of their stage ``process``, and of hits."""
    found = Registry()
    words = ("image", "audio", "video")
    items = found.counter("afferent_items_total", "", modality=words, outcome=("hit", "made"))
    items.labels("image", "hit").inc(hits)
    items.labels("video", "hit").inc(unmade)
    items.labels(media, "made").inc(len(seconds))
    stages = ("decode", "process", "prefill")
    spent = found.histogram("afferent_stage_seconds", "", (0.1, 1.0), stage=stages, media=words)
    nbytes = found.counter("afferent_copied_bytes_total", "", stage=stages, media=words)
    for each in seconds:
        spent.labels("decode", media).observe(0.5)
        spent.labels("process", media).observe(each)
        spent.labels("prefill", media).observe(100.0)
        nbytes.labels("decode", media).inc(3 * copied)
        nbytes.labels("process", media).inc(copied)
    return found


def figure(seen: View, station: str, label: str) -> float | None:
    (found,) = [each for each in seen.way if each.name == station]
    (value,) = [each.value for each in found.figures if each.label == label]
    return value


def station(seen: View, name: str) -> Station:
    return next(each for each in seen.way if each.name == name)


def test_rates_and_quantiles_are_of_what_is_new() -> None:
    before = metrics(hits=10, made=5, waits=[0.3] * 100).readings()
    after = metrics(hits=30, made=10, waits=[0.3] * 100 + [0.05] * 50 + [0.15] * 50).readings()
    change = Change(before, after, elapsed_s=5.0)
    assert change.rate("afferent_items_total") == 5.0
    assert change.rate("afferent_items_total", outcome="hit") == 4.0
    assert change.now("afferent_items_total", outcome="made") == 10.0
    assert change.quantile(0.5, "afferent_admission_seconds") == pytest.approx(0.1)
    assert change.quantile(0.99, "afferent_admission_seconds") == pytest.approx(0.198)


def test_of_nothing_nothing_is_said() -> None:
    one = metrics(hits=1, made=0, waits=[0.1]).readings()
    same = Change(one, one, elapsed_s=1.0)
    assert same.rate("afferent_items_total") == 0.0
    assert same.quantile(0.5, "afferent_admission_seconds") is None
    gone = Change(one, [], elapsed_s=1.0)
    assert (gone.rate("afferent_items_total"), gone.now("afferent_items_total")) == (0.0, 0.0)


def test_who_begins_anew_has_counted_all_of_it_since() -> None:
    before = metrics(hits=100, made=0, waits=[0.05] * 9).readings()
    after = metrics(hits=6, made=0, waits=[0.15]).readings()
    change = Change(before, after, elapsed_s=2.0)
    assert change.rate("afferent_items_total", outcome="hit") == 3.0
    assert change.quantile(0.5, "afferent_admission_seconds") == pytest.approx(0.15)


def test_above_all_bounds_is_the_highest() -> None:
    change = Change([], metrics(hits=0, made=0, waits=[9.0]).readings(), elapsed_s=1.0)
    assert change.quantile(0.5, "afferent_admission_seconds") == 0.4


def test_rates_after_a_restart_of_the_store_are_unknown() -> None:
    """The new store's counts may be larger than the old one's: no rate is computed from both."""
    told = journal("ok")
    before, after = (
        observation(
            report(told),
            taken_s=taken_s,
            statistics=statistics(segment=segment),
            readings=metrics(hits=hits, made=0, waits=[]).readings(),
        )
        for taken_s, segment, hits in ((10.0, 1, 100), (12.0, 2, 900))
    )
    seen = view(before, after)
    assert (seen.over_s, seen.hit_rate) == (0.0, None)
    assert figure(seen, "Media", "items") == 0.0
    assert seen.savings.num_items["hit"] == 900


def test_a_view_of_a_server_at_work() -> None:
    told = journal("ok", "store_full", "")
    old, new = statistics(), statistics()
    share = new.kinds[ObjectKind.FEATURES]
    share.used_nbytes, share.held_nbytes, share.num_evicted = 8 * MiB, 3 * MiB, 10
    new.num_reservations_queued, new.permits = 2, {"preprocess": PermitStatistics(4, 5)}
    before = observation(
        report(told, engine=EngineStats(num_steps=5, num_encoded=[1])),
        taken_s=10.0,
        statistics=old,
        readings=metrics(hits=0, made=0, waits=[]).readings(),
    )
    after = observation(
        report(told, engine=EngineStats(3, 2, 15, num_encoded=[2, 3])),
        taken_s=12.0,
        statistics=new,
        readings=metrics(hits=30, made=10, waits=[0.1]).readings(),
    )
    seen = view(before, after)
    assert (seen.problem, seen.model, seen.hit_rate, seen.over_s) == ("", "shapes", 0.75, 2.0)
    assert figure(seen, "Media", "items") == 20.0
    assert figure(seen, "Engine", "encoded") == 2.0
    assert figure(seen, "Engine", "steps") == 5.0
    assert figure(seen, "Gate", "waiting") == 7
    assert station(seen, "Gate").state == station(seen, "Engine").state == "waiting"
    assert station(seen, "Answers").state == "idle"
    (features,) = [each for each in seen.kinds if each.kind == "features"]
    assert (features.pinned_nbytes, features.evictable_nbytes) == (3 * MiB, 5 * MiB)
    assert features.free_nbytes == features.capacity_nbytes - 8 * MiB
    assert features.evicted_per_s == 5.0
    assert [each.outcome for each in seen.ended] == ["store_full", "ok"]
    (running,) = seen.running
    assert (running.where, running.copied_nbytes, seen.num_running) == ("body", 6144, 1)
    decode = running.stages[1]
    assert (decode.process, decode.stage) == ("preprocess-1 9", "decode")
    assert (decode.start_s, decode.seconds) == pytest.approx((0.001, 0.002))
    assert msgspec.json.decode(msgspec.json.encode(seen), type=View) == seen


def test_savings_are_hits_times_the_mean_of_made_items() -> None:
    before = made_metrics(hits=6, seconds=[1.0, 2.0], copied=100)
    after = made_metrics(hits=10, seconds=[1.0, 2.0], copied=100, unmade=7)
    first, last = (
        observation(taken_s=at_s, readings=metrics.readings())
        for at_s, metrics in ((0.0, before), (2.0, after))
    )
    found = view(first, last).savings
    assert found.num_items == {"hit": 17, "joined": 0, "fetched": 0, "made": 2, "failed": 0}
    assert found.hit_rate == pytest.approx(17 / 19)
    assert found.num_unmeasured == 7, "no video was made"
    assert found.saved_s == pytest.approx(10 * (0.5 + 1.5))
    assert found.saved_s_per_s == pytest.approx(2 * (0.5 + 1.5))
    assert (found.copied_nbytes, found.features_nbytes) == (4000, 1000)


def test_savings_without_counts_are_nothing() -> None:
    found = view(observation(), observation()).savings
    assert (found.hit_rate, found.saved_s, found.copied_nbytes) == (None, 0.0, 0.0)
    unmeasured = made_metrics(hits=3, seconds=[], copied=1).readings()
    found = view(observation(), observation(readings=unmeasured)).savings
    assert (found.num_unmeasured, found.saved_s, found.hit_rate) == (3, 0.0, 1.0)


def test_earliest_snapshot_without_counts_is_skipped() -> None:
    counts = metrics(hits=1000, made=0, waits=[]).readings()
    seen = [observation(taken_s=1.0), *(observation(taken_s=at, readings=counts) for at in (2, 3))]
    assert earliest(seen) is seen[1]
    assert view(earliest(seen), seen[-1]).hit_rate is None, "nothing is new"
    assert earliest(seen[:1]) is seen[0]


def test_an_upstream_is_shown_by_its_own_figures() -> None:
    def stats(num_tokens: int) -> UpstreamStats:
        return UpstreamStats(
            num_running=3, num_waiting=1, kv_in_use=0.5, num_prompt_tokens=9, num_tokens=num_tokens
        )

    told = journal("ok")
    before, after, anew = (
        observation(report(told, upstream=stats(number)), taken_s=at_s)
        for number, at_s in ((10, 1.0), (30, 3.0), (4, 5.0))
    )
    seen = view(before, after)
    assert station(seen, "Engine").state == "waiting"
    labels = ("running", "waiting", "KV in use", "tokens")
    assert [figure(seen, "Engine", label) for label in labels] == [3, 1, 0.5, 10.0]
    assert figure(view(after, anew), "Engine", "tokens") == 0.0
    assert figure(view(observation(), after), "Engine", "tokens") == 0.0


def test_requests_of_several_frontends_are_one_list() -> None:
    many = [report(journal(*["ok"] * KEPT), pid=pid) for pid in (1, 2)]
    seen = view(observation(*many), observation(*many))
    ends = [each.ended_s_ago for each in seen.ended]
    assert (len(ends), seen.num_frontends) == (KEPT, 2)
    assert figure(seen, "Requests", "in flight") == 0


def test_shares_are_of_those_who_want_some() -> None:
    told = [report(journal("", "", tenant="a"), pid=1), report(journal("", tenant=""), pid=2)]
    tenants = [TenantInfo("a", 3.0, 100, 1, 50, 1, 4), TenantInfo("gone", 1.0, 7)]
    seen = view(observation(), observation(*told, tenants=tenants))
    found = [
        (each.name, each.share, each.num_running, each.num_waiting) for each in seen.gate.tenants
    ]
    assert found == [("", 0.2, 1, 0), ("a", 0.6, 2, 2), ("gone", 0.2, 0, 0)]


def test_items_have_the_names_of_those_who_hold_them() -> None:
    handle = Handle(1, 0, 640, 1)
    found = [
        ObjectInfo(handle, ObjectKind.FEATURES, "sealed", b"\xab" * 32, None, [2, 9]),
        ObjectInfo(handle, ObjectKind.RAW, "created", None, 0, []),
    ]
    clients = [ClientInfo(2, "core", 77, True, 1, 640, 0)]
    lists = Lists(objects=found, clients=clients)
    seen = view(observation(), observation(lists=lists, statistics=statistics()))
    first, second = seen.items
    assert (first.key, first.held_by) == ("ab" * 6, ["core 77", "client 9"])
    assert (second.key, second.state, second.held_by) == ("", "created", ["the store"])
    assert seen.processes[0].name == "core"


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (observation(), "no frontend answers"),
        (observation(report(journal("ok"))), "the store does not answer"),
    ],
)
def test_what_does_not_answer_is_said(after: Observation, problem: str) -> None:
    seen = view(observation(report(journal("ok")), statistics=statistics()), after)
    assert seen.problem == problem
    assert seen.kinds == []
    assert figure(seen, "Engine", "running") is None
    assert figure(seen, "Preprocessing", "queued") is None


def test_a_new_life_of_the_store_has_evicted_nothing_yet() -> None:
    old, new = statistics(segment=1), statistics(segment=2)
    old.kinds[ObjectKind.RAW].num_evicted = 50
    seen = view(observation(taken_s=0.0, statistics=old), observation(taken_s=1.0, statistics=new))
    assert {each.evicted_per_s for each in seen.kinds} == {0.0}


# In a terminal


def printed(seen: View, *, width: int, num_lines: int | None = None) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(frame(seen, width=width, num_lines=num_lines))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 110, 200])
def test_a_frame_fits_its_columns(width: int) -> None:
    told = report(journal("ok", "store_full", "", "client_gone"), engine=EngineStats(1, 2, 3))
    seen = view(observation(), observation(told, statistics=statistics()))
    lines = printed(seen, width=width)
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    for words in (
        "shapes",
        "1 requests in flight",
        "Preprocessing",
        "Saved",
        "records",
        "store full",
    ):
        assert words in text
    requests = [line for line in lines if "chat/completions" in line]
    assert len(requests) == 4
    assert all(line.rstrip().endswith((" ms", " s")) for line in requests)
    assert "…" not in "".join(line for line in lines if line not in requests)


def test_a_frame_has_as_many_requests_as_there_are_lines() -> None:
    told = report(journal(*["ok"] * KEPT))
    seen = view(observation(), observation(told, statistics=statistics()))
    lines = printed(seen, width=100, num_lines=30)
    assert len(lines) <= 30
    assert sum("chat/completions" in line for line in lines) > 5


def test_a_name_can_not_steer_the_terminal() -> None:
    told = report(journal("ok", tenant="a"))
    tenants = [TenantInfo("\x1b[2Jb", 1.0)]
    after = observation(told, statistics=statistics(), tenants=tenants)
    assert "\x1b" not in "\n".join(printed(view(observation(), after), width=100))


def test_figures_as_people_read_them() -> None:
    shown = [
        *(show(None, "s"), show(0.00123, "s"), show(0.25, "s"), show(2.5, "s"), show(75.0, "s")),
        *(show(0.5, "%"), show(1.0, "%"), show(3.25, "/s"), show(1234.0, "/s")),
        *(show(2 * MiB, "B"), show(1536.0, "B/s"), show(12345)),
    ]
    assert shown == [
        *("-", "1.2 ms", "250 ms", "2.50 s", "75.0 s"),
        *("50.0 %", "100 %", "3.2 /s", "1,234 /s"),
        *("2.0 MiB", "1.5 KiB/s", "12,345"),
    ]
