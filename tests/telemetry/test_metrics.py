"""Metrics are on the page and in the documented list, in the format of Prometheus."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import afferent.builtin.engine.kind
import afferent.builtin.frontend
import afferent.engines.http_upstream.client
import afferent.engines.openai.kind
import afferent.engines.vllm.kind
import afferent.engines.vllm.plugin.counting  # a frontend imports it when the engine is chosen
import afferent.tier.main  # noqa: F401 - these modules declare metrics and stages
from afferent import errors
from afferent.admission.permits import PermitStatistics
from afferent.builtin.apis.registry import APIS, by_path
from afferent.engines.metrics import engine_readings
from afferent.engines.protocol import EngineStats
from afferent.proxy import counting
from afferent.proxy.counting import AnswerTimes, count_lateness, count_request, count_stages
from afferent.store.client.metrics import store_readings
from afferent.store.state.machine import StoreState
from afferent.telemetry import exposition
from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import REGISTRY, Registry
from afferent.telemetry.trace import STAGES, Trace
from afferent.types import MiB, ObjectKind, span_since

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/afferent"


def test_with_zeros_adds_what_was_not_counted() -> None:
    registry = Registry()
    asked = registry.counter("asked_total", "Asked", api=("a", "b"))
    other = registry.counter("other_total", "Other", api=("c",))
    asked.labels("a").inc(2)
    counted = registry.readings()[:1]
    page = exposition.render(exposition.with_zeros(counted, registry.zeros())).decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert lines == [
        'asked_total{api="a"} 2.0',
        'asked_total{api="b"} 0.0',
        'other_total{api="c"} 0.0',
    ]
    assert [len(reading.series) for reading in counted] == [1], "what was given is as it was"
    assert other.reading().series == []


Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(readings: Iterable[Reading] | None = None) -> Found:
    """Return the parsed page, by default of this process's metrics."""
    text = exposition.render(REGISTRY.readings() if readings is None else readings).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_are_written_as_prometheus_reads_them() -> None:
    registry = Registry()
    requests = registry.counter("requests_total", "Asked", api=("chat",), outcome=("ok",))
    requests.labels("chat", "ok").inc()
    requests.labels("chat", "ok").inc(2)
    requests.labels("chat", 'a "b"\nc').inc(5)
    waits = registry.histogram("wait_seconds", "Waits", (0.001, 0.01, 120.0))
    for seconds in (0.0, 0.001, 0.0011, 1000.0):
        waits.labels().observe(seconds)
    in_flight = registry.gauge("in_flight", "Now")
    with in_flight.labels().track():
        during = parsed(registry.readings())
    found = parsed(registry.readings())
    assert found["requests_total", (("api", "chat"), ("outcome", "ok"))] == 3
    assert found["requests_total", (("api", "chat"), ("outcome", "other"))] == 5
    assert found["wait_seconds_bucket", (("le", "0.001"),)] == 2, "at most"
    assert found["wait_seconds_bucket", (("le", "0.01"),)] == 3
    assert found["wait_seconds_bucket", (("le", "120.0"),)] == 3
    assert found["wait_seconds_bucket", (("le", "+Inf"),)] == 4
    assert found["wait_seconds_count", ()] == 4
    assert found["wait_seconds_sum", ()] == pytest.approx(1000.0021)
    assert (during["in_flight", ()], found["in_flight", ()]) == (1, 0)


def test_every_metric_is_named_even_where_nothing_was_counted() -> None:
    text = exposition.render(REGISTRY.readings()).decode()
    counted = {reading.metric.name for reading in REGISTRY.readings()}
    assert "afferent_requests_total" in counted
    assert set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE)) == counted


def test_a_metric_is_on_the_page_once() -> None:
    """Prometheus refuses a page with duplicates."""
    first, second = Registry(), Registry()
    first.gauge("now", "Now").labels().set(1)
    second.gauge("now", "Now").labels().set(2)
    assert parsed([*first.readings(), *second.readings()]) == {("now", ()): 2}


def test_the_store_and_the_engine_say_what_they_do() -> None:
    """A semaphore with an unknown name is counted as "other"."""
    statistics = StoreState(4 * MiB, segment=3).statistics()
    statistics.permits = {"tenant": PermitStatistics(2, 1), "made/up": PermitStatistics(5, 0)}
    found = parsed(store_readings(statistics))
    assert found["afferent_store_epoch", ()] == 3
    kinds = [(("kind", kind.value),) for kind in ObjectKind]
    capacity = [found["afferent_arena_capacity_bytes", kind] for kind in kinds]
    assert capacity == [statistics.kinds[kind].capacity_nbytes for kind in ObjectKind]
    taken = {labels: n for (name, labels), n in found.items() if name == "afferent_permits_taken"}
    names = ("preprocess", "forwarded", "live_audio", "uploads", "uploads_of", "tenant", "other")
    assert list(taken.values()) == [0, 0, 0, 0, 0, 2, 5]
    assert list(taken) == [(("semaphore", name),) for name in names]
    stats = EngineStats(num_steps=7, num_encoded=[1] * 70)
    found = parsed(engine_readings(stats))
    assert found["afferent_engine_steps_total", ()] == 7
    assert found["afferent_engine_encoded_items_total", (("worker", "63"),)] == 1
    assert found["afferent_engine_encoded_items_total", (("worker", "other"),)] == 6


def test_all_stages_that_the_code_measures_are_known() -> None:
    """Stages of this process are recorded; those of other processes are declared."""
    named, of_others = set(), set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        named |= set(re.findall(r'\.stage\(\s*\w+, "([^"]+)"', text))
        named |= set(re.findall(r'\bstage(?:: str)?\s?=\s?"([^"]+)"', text))
        of_others |= set(re.findall(r'\._span\("([^"]+)"', text))
        of_others |= set(re.findall(r'span_since\(\s*[\w.]+,\s*"\w+",\s*"([^"]+)"', text))
    assert {"read_body", "wait_for_features", "plan"} <= named
    assert {"decode", "prefill", "accept"} <= of_others <= STAGES
    page = (ROOT / "docs/metrics.md").read_text()
    for word in named | of_others | {"encode", "copy_embeddings"}:
        assert f"`{word}`" in page, word


@pytest.mark.parametrize(
    ("code", "came_to", "where"),
    [
        ("store_full", "body", "admission"),
        ("deadline_exceeded", "body", "admission"),
        ("body_too_slow", "body", "body"),
        ("fetch_failed", "fetch", "fetch"),
        ("store_full", "admission", "admission"),
        ("invalid_media", "preprocess", "preprocess"),
        ("worker_died", "engine", "engine"),
        ("client_gone", "engine", "engine"),
    ],
)
def test_what_did_not_end_well_is_counted_where_it_ended(
    code: str, came_to: str, where: str
) -> None:
    trace = Trace("r", "POST /v1/chat/completions")
    trace.media = "image"
    with pytest.raises(ArithmeticError), trace.at(came_to):
        raise ArithmeticError
    with trace.at("engine"):
        pass
    counting.APIS.add("openai_chat")
    count_request(trace, "openai_chat", code, seconds=0.1)
    labels = (("code", code), ("media", "image"), ("where", where))
    assert parsed()["afferent_rejections_total", labels] == 1


def test_the_codes_are_those_of_all_errors_wherever_they_are() -> None:
    codes = {cls.code for cls in errors.walk()}
    for code in codes:
        count_request(Trace("r", "POST /"), "openai_chat", code, seconds=0.1)
    found = {dict(labels).get("code") for _, labels in parsed()}
    assert codes <= found
    assert "other" not in found


def test_the_store_needs_no_library_to_count_and_none_for_arrays() -> None:
    program = (
        "import sys, afferent.store.daemon.main;"
        "print({'prometheus_client', 'numpy', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_the_page_lists_every_metric_and_its_labels() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(afferent_\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    listed = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert listed == {
        metric.name: (metric.kind, list(metric.labels)) for metric in REGISTRY.declarations
    }
    apis = [api.name for api in by_path(APIS).values()]
    for word in (*counting.MEDIA, *counting.PLACES, *apis):
        assert f"`{word}`" in page, word


def test_an_event_loop_that_was_held_up_says_so() -> None:

    async def main() -> None:
        JOURNAL.begin(Trace("r", "POST /"))  # the polls are rarer without a request
        task = asyncio.create_task(count_lateness())
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - what holds it up
        while not parsed()["afferent_event_loop_late_seconds_count", ()]:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    assert 0.19 < parsed()["afferent_event_loop_late_seconds_sum", ()] < 30


def test_a_stage_of_a_request_is_counted_by_its_media() -> None:
    trace = Trace("r", "POST /")
    trace.media = "mixed"
    trace.add([span_since(0, "worker", "encode", copied_nbytes=7)])
    count_stages(trace)
    labels = (("media", "mixed"), ("stage", "encode"))
    assert parsed()["afferent_copied_bytes_total", labels] == 7
    assert parsed()["afferent_stage_seconds_count", labels] == 1


def test_the_times_of_an_answer() -> None:
    """If a step yields several tokens, its time is divided between them."""
    trace = Trace("r", "POST /", start_ns=1_000_000_000, media="image")
    times = AnswerTimes(trace)
    for at_s, num_tokens in ((1.5, 1), (1.52, 2), (1.52, 0), (1.58, 1)):
        times.tokens(num_tokens, now_ns=int(at_s * 1e9))
    times.end()
    found = parsed()
    media = (("media", "image"),)
    assert found["afferent_time_to_first_token_seconds_sum", media] == pytest.approx(0.5)
    assert found["afferent_inter_token_seconds_count", ()] == 3
    assert found["afferent_inter_token_seconds_bucket", (("le", "0.01"),)] == 2
    assert found["afferent_inter_token_seconds_sum", ()] == pytest.approx(0.08)
    assert found["afferent_time_per_output_token_seconds_count", ()] == 1
    per_token_s = found["afferent_time_per_output_token_seconds_sum", ()]
    assert per_token_s == pytest.approx(0.08 / 3)


def test_an_answer_of_one_token_has_no_time_between() -> None:
    times = AnswerTimes(Trace("r", "POST /", media="none"))
    times.end()
    times.tokens(1, now_ns=time.monotonic_ns())
    times.end()
    found = parsed()
    assert found["afferent_time_to_first_token_seconds_count", (("media", "none"),)] == 1
    assert found["afferent_time_per_output_token_seconds_count", ()] == 0
    assert found["afferent_inter_token_seconds_count", ()] == 0
