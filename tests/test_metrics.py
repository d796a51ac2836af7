"""What is counted has a fixed name and fixed words, and is written as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from afferent import metrics
from afferent.metrics import REGISTRY, Metrics
from afferent.serve import exposition
from afferent.serve.account import Account
from afferent.serve.apis import APIS, TOKEN_COUNTS
from afferent.serve.counting import count_lateness, count_request, count_stages
from afferent.types import span_since

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/afferent"


def parsed(counted: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = exposition.render(counted.samples()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_are_written_as_prometheus_reads_them() -> None:
    counted = Metrics()
    counted.requests.labels("openai_chat", "ok").inc()
    counted.requests.labels("openai_chat", "ok").inc(2)
    counted.tokens.labels("prompt").inc(5)
    for seconds in (0.0, 0.001, 0.0011, 1000.0):
        counted.admission_seconds.observe(seconds)
    with counted.in_flight.track_inprogress():
        during = parsed(counted)
    found = parsed(counted)
    labels = (("api", "openai_chat"), ("outcome", "ok"))
    assert found["afferent_requests_total", labels] == 3
    assert found["afferent_tokens_total", (("kind", "prompt"),)] == 5
    assert found["afferent_admission_seconds_bucket", (("le", "0.001"),)] == 2, "at most"
    assert found["afferent_admission_seconds_bucket", (("le", "0.01"),)] == 3
    assert found["afferent_admission_seconds_bucket", (("le", "120.0"),)] == 3
    assert found["afferent_admission_seconds_bucket", (("le", "+Inf"),)] == 4
    assert found["afferent_admission_seconds_count", ()] == 4
    assert found["afferent_admission_seconds_sum", ()] == pytest.approx(1000.0021)
    assert during["afferent_requests_in_flight", ()] == 1
    assert found["afferent_requests_in_flight", ()] == 0


def test_every_metric_is_named_even_where_nothing_was_counted() -> None:
    text = exposition.render([]).decode()
    assert set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE)) == set(REGISTRY)


def test_what_is_not_a_word_of_ours_is_other() -> None:
    counted = Metrics()
    for hostile in ("http://169.254.169.254/", "f" * 64, 'a"b\nc', ""):
        counted.requests.labels("openai_chat", hostile).inc()
    labels = (("api", "openai_chat"), ("outcome", "other"))
    assert parsed(counted)["afferent_requests_total", labels] == 4
    assert len(list(counted.requests.samples())) == 1
    with pytest.raises(ValueError, match="argument"):
        counted.requests.labels("openai_chat")


def test_all_words_that_the_code_uses_are_on_the_lists() -> None:
    assert {api.name for api in [*APIS.values(), *TOKEN_COUNTS.values()]} <= set(metrics.APIS)
    named = set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        named |= set(re.findall(r'\.stage\(\s*\w+, "([^"]+)"', text))
        named |= set(re.findall(r'\._span\("([^"]+)"', text))
        named |= set(re.findall(r'span_since\(\s*[\w.]+, "\w+", "([^"]+)"', text))
    assert {"read body", "decode", "prefill", "accept"} <= named
    assert named <= set(metrics.STAGES)


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
    counted = Metrics()
    account = Account("r", "POST /v1/chat/completions")
    account.media = "image"
    with pytest.raises(ArithmeticError), account.at(came_to):
        raise ArithmeticError
    with account.at("engine"):
        pass
    count_request(counted, account, "openai_chat", code, seconds=0.1)
    labels = (("code", code), ("media", "image"), ("where", where))
    assert parsed(counted)["afferent_rejections_total", labels] == 1


def test_the_store_needs_no_library_to_count() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, afferent.store.daemon; print('prometheus_client' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "False\n"


def test_the_page_lists_every_metric_and_its_labels() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(afferent_\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    listed = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert listed == {
        metric.name: (metric.kind, [label.name for label in metric.labels])
        for metric in REGISTRY.values()
    }
    for words in (metrics.STAGES, metrics.MEDIA, metrics.PLACES, metrics.APIS):
        for word in words:
            assert f"`{word}`" in page, word


def test_an_event_loop_that_was_held_up_says_so() -> None:
    counted = Metrics()

    async def main() -> None:
        task = asyncio.create_task(count_lateness(counted))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - what holds it up
        while not parsed(counted)["afferent_event_loop_late_seconds_count", ()]:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    assert 0.19 < parsed(counted)["afferent_event_loop_late_seconds_sum", ()] < 30


def test_a_stage_of_a_request_is_counted_by_its_media() -> None:
    counted = Metrics()
    account = Account("r", "POST /")
    account.media = "mixed"
    account.add([span_since(0, "worker", "encode", copied_nbytes=7)])
    count_stages(counted, account)
    labels = (("media", "mixed"), ("stage", "encode"))
    assert parsed(counted)["afferent_copied_bytes_total", labels] == 7
    assert parsed(counted)["afferent_stage_seconds_count", labels] == 1
