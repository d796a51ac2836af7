"""Health, metrics, logs and traces, as an operator sees them; and a model of another family."""

from __future__ import annotations

import base64
import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.request import Message, TextPart
from afferent.conformance.images import DrawnImage, draw_image
from afferent.items.request import MediaPart
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.discover import family_of
from afferent.types import GiB, Modality
from tests import plain_http
from tests.media.test_fetch import media_host, send
from tests.models import make_llava
from tests.server import TINY, TINY_ENGINE, Server, ask, data_url, suspended, wait_until
from tests.telemetry.collector import Collector, attributes_of

QUESTION = "What is in the picture?"


def test_health_ready_models(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    ready = server.get("/ready")
    assert ready.status_code == 200
    parts = {"store": True, "preprocess": True, "engine": True}
    assert ready.json() == {"ready": True, **parts, "frozen": []}
    assert [model.id for model in server.client().models.list()] == ["shapes"]
    assert server.client().models.retrieve("shapes").id == "shapes"
    for path in ("/nothing", "/v1/models/nobody", "/v1/chat/completions"):
        refused = server.get(path)
        assert refused.status_code == (405 if "chat" in path else 404)
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_metrics_begin_at_zero(first_metrics: dict[str, float]) -> None:
    """Otherwise `rate` would miss the first increase of a series."""
    for name in (
        'afferent_requests_total{api="openai_chat",outcome="ok"}',
        'afferent_requests_total{api="anthropic_messages",outcome="internal_error"}',
        'afferent_rejections_total{code="store_full",media="none",where="admission"}',
        'afferent_items_total{modality="image",outcome="hit"}',
        'afferent_media_bytes_total{modality="video",origin="fetch"}',
        'afferent_tokens_total{kind="prompt"}',
        'afferent_conversations_total{outcome="kept"}',
        'afferent_copied_bytes_total{media="image",stage="read_body"}',
        'afferent_engine_encoded_items_total{worker="0"}',
        'afferent_request_seconds_count{api="openai_chat"}',
        'afferent_time_to_first_token_seconds_count{media="image"}',
    ):
        assert first_metrics.get(name) == 0.0, name
    assert len(first_metrics) < 2500


def test_metrics_count_what_happened(server: Server, rng: np.random.Generator) -> None:
    def read() -> dict[str, float]:
        return server.metrics()

    before = read()
    server.post(ask([data_url(draw_image(rng))], QUESTION))
    server.post({"model": "nobody", "messages": [{"role": "user", "content": "hi"}]})
    after = read()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grew('afferent_requests_total{api="openai_chat",outcome="ok"}') == 1
    assert grew('afferent_requests_total{api="openai_chat",outcome="model_not_found"}') == 1
    assert grew('afferent_items_total{modality="image",outcome="made"}') == 1
    assert grew('afferent_stage_seconds_count{media="image",stage="decode"}') == 1
    assert grew('afferent_tokens_total{kind="completion"}') >= 1
    lost_nbytes = 256 * 2**20 - server.metric("afferent_arena_capacity_bytes")
    assert 0 <= lost_nbytes < 4 * 64, "each kind's share is whole cache lines"
    assert after["afferent_store_workers"] == 2


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def green_circle() -> DrawnImage:
    return draw_image(np.random.default_rng(0), colour="green", shape="circle")


@pytest.fixture(scope="module")
def host_of_pictures(green_circle: DrawnImage) -> Iterator[str]:
    """A host with the picture ``/p.png``, and without ``/none``."""
    answers = {"/p.png": send(green_circle.encode("PNG")), "/none": send(b"", 404)}
    with media_host(answers) as where:
        yield where


@pytest.fixture(scope="module")
def started(
    collector: Collector, host_of_pictures: str
) -> Iterator[tuple[Server, dict[str, float]]]:
    """A server that sends its traces to the collector, and its metrics before the first request.

    It may fetch from the host of pictures.
    """
    arguments = ["--log-format", "json", "--log-level", "info", "--explain"]
    arguments += ["--fetch-allow", host_of_pictures]
    with Server(*arguments, env=collector.environ) as server:
        yield server, server.metrics()


@pytest.fixture
def explaining(started: tuple[Server, dict[str, float]]) -> Server:
    return started[0]


@pytest.fixture
def first_metrics(started: tuple[Server, dict[str, float]]) -> dict[str, float]:
    return started[1]


def trace_of(server: Server, response: httpx.Response) -> str:
    """Return the output of ``--explain`` for a request."""
    title = f"{response.headers['x-request-id']}  POST "

    def trace() -> str:
        _, _, rest = server.log().partition(title)
        return rest.partition(" copied in all")[0] if "copied in all" in rest else ""

    wait_until(lambda: trace() != "")
    return trace()


def test_json_logs_carry_the_request_id(explaining: Server, rng: np.random.Generator) -> None:
    response = explaining.post(ask([data_url(draw_image(rng))], QUESTION))
    request_id = response.headers["x-request-id"]
    assert response.json()["id"] == request_id

    def events() -> list[dict]:
        lines = [json.loads(line) for line in explaining.lines if line.startswith("{")]
        return [line for line in lines if line.get("request_id") == request_id]

    wait_until(lambda: len(events()) > 0)
    (event,) = events()
    assert event["outcome"] == "ok"
    assert event["process"] == "frontend-0"
    assert event["ms"] > 0
    assert (event["api"], event["media"]) == ("openai_chat", "image")
    assert event["completion_tokens"] == response.json()["usage"]["completion_tokens"]
    trace = trace_of(explaining, response)
    stages = ["read body", "digest", "tokenize", "acquire"]
    stages += ["into the arena", "room for features", "queue jobs"]
    stages += ["decode", "process", "encode", "prefill"]
    rows = trace[trace.index("─") :]
    places = [rows.index(f" {stage} ") for stage in stages]
    assert places == sorted(places), "the stages stand in the order in which they ran"
    pids = {int(pid) for pid in re.findall(r"(?:frontend|core|worker|preprocess-\d) (\d+)", trace)}
    assert pids <= {process.pid for process in explaining.processes()}
    assert len(pids) == 4
    for figure in (" kB", "copied", " ms"):
        assert figure in trace
    assert not [line for line in explaining.lines if "ERROR" in line or '"error"' in line]


def test_json_logs_have_an_object_in_every_line() -> None:
    """Starts, deaths and stops of all processes, and errors before the start.

    `test_a_model_of_another_family` reads the lines of the built-in engine's processes.
    """
    arguments = ["--log-format", "json", "--log-level", "warning"]
    with Server(*TINY_ENGINE, *arguments) as server:
        (worker, _) = server.idle_preprocess_workers()
        for process in (worker, *server.find("afferent.builtin.frontend")):
            process.kill()
        wait_until(lambda: "frontend-0" in _parts(server, "has ended (SIGKILL); starting it again"))
        wait_until(lambda: len(_parts(server, "ready: ")) > len(set(_parts(server, "ready: "))))
    events = [json.loads(line) for line in server.lines]
    assert all(isinstance(event, dict) for event in events)
    assert all({"time", "level", "process", "event"} <= event.keys() for event in events)
    (serving,) = [event for event in events if event["event"].startswith("Serving ")]
    assert (serving["model"], serving["url"]) == ("shapes", f"{server.url}/v1")
    (death,) = [event for event in events if "has ended (SIGKILL)" in event["event"]]
    assert (death["level"], death["part"]) == ("warning", "frontend-0")
    assert [event.get("part") for event in events][-2:] == ["stopping", "stopped"]
    assert "a worker has died; it is replaced" in [event["event"] for event in events]


def _parts(server: Server, start: str) -> list[str]:
    """Return the processes for which the supervisor has logged such an event."""
    events = [json.loads(line) for line in server.lines]
    return [event["part"] for event in events if event["event"].startswith(start)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--log-format", "json", "--port", "x"], "--port x"),
        (["--log-format=json", "--no-such-flag"], "--no-such-flag"),
        (["--log-format", "json", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_json_logs_have_what_keeps_a_server_from_starting(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "afferent.cli", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    event = json.loads(done.stderr.splitlines()[-1])
    assert all(json.loads(line) for line in done.stderr.splitlines())
    assert (event["level"], event["code"]) == ("error", "config_error")
    assert words in event["event"]


def test_a_request_is_a_trace_at_a_collector(
    explaining: Server, collector: Collector, rng: np.random.Generator
) -> None:
    """The trace has all stages of all processes below the client's span, and no media bytes."""
    picture = draw_image(rng).encode("PNG")
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    body = ask([data_url(picture, "png")], QUESTION)
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    url = f"{explaining.url}/v1/chat/completions"
    answer = plain_http.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200

    def found() -> list[Any]:
        return [span for span in collector.of_trace(trace_id) if span.name == "chat shapes"]

    wait_until(lambda: bool(found()))
    (root,) = found()
    stages = [span for span in collector.of_trace(trace_id) if span is not root]
    assert root.parent_span_id.hex() == parent_id
    assert {span.parent_span_id for span in stages} == {root.span_id}
    names = {span.name for span in stages}
    assert names >= {"read_body", "digest", "tokenize", "acquire", "decode", "process"}
    assert names >= {"accept", "encode", "prefill"}
    pids = {attributes_of(span)["process.pid"] for span in stages}
    assert len(pids) == 4
    assert pids <= {process.pid for process in explaining.processes()}
    for span in stages:
        assert root.start_time_unix_nano <= span.start_time_unix_nano + 1_000_000
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
    said, usage = attributes_of(root), answer.json()["usage"]
    assert said["gen_ai.response.id"] == answer.json()["id"]
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    (digest,) = said["afferent.item_digests"]
    assert len(digest) == 64
    sent = b"".join(collector.bodies)
    assert picture[:64] not in sent
    assert base64.b64encode(picture)[:64] not in sent


def test_a_repeated_picture_is_a_hit(explaining: Server, rng: np.random.Generator) -> None:
    """The trace shows no decode and no processor, and no byte of features is copied."""
    request = ask([data_url(draw_image(rng))], QUESTION)
    first = explaining.post(request)
    before = explaining.metrics()
    repeated = explaining.post(request)
    after = explaining.metrics()
    assert first.json()["choices"] == repeated.json()["choices"]

    def grew(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grew('afferent_items_total{modality="image",outcome="hit"}') == 1
    assert grew('afferent_items_total{modality="image",outcome="made"}') == 0
    for stage in ("decode", "process"):
        assert before[f'afferent_stage_seconds_count{{media="image",stage="{stage}"}}'] >= 1
        assert grew(f'afferent_stage_seconds_count{{media="image",stage="{stage}"}}') == 0
        assert grew(f'afferent_copied_bytes_total{{media="image",stage="{stage}"}}') == 0
    assert "preprocess-" in trace_of(explaining, first)
    assert "preprocess-" not in trace_of(explaining, repeated)
    assert "1 image hit" in trace_of(explaining, repeated)


def test_pictures_from_a_host_of_the_operators_own(
    explaining: Server, host_of_pictures: str, green_circle: DrawnImage
) -> None:
    response = explaining.post(ask([f"http://{host_of_pictures}/p.png"], QUESTION))
    assert response.json()["choices"][0]["message"]["content"] == "a green circle"
    missing = explaining.post(ask([f"http://{host_of_pictures}/none"], QUESTION))
    assert missing.status_code == 400
    assert missing.json()["error"]["code"] == "fetch_failed"
    hit = 'afferent_items_total{modality="image",outcome="hit"}'
    before = explaining.metrics()[hit]
    same_bytes = explaining.post(ask([data_url(green_circle, "png")], QUESTION))
    assert same_bytes.status_code == 200
    num_hits = explaining.metrics()[hit] - before
    assert num_hits == 1, "what a picture is does not depend on how it came"


def test_a_model_of_another_family(tmp_path: Path, rng: np.random.Generator) -> None:
    """The text of a LLaVA with random weights is that of plain `generate`.

    Every line of the log is a JSON object.
    """
    folder = tmp_path / "tiny-llava"
    make_llava(folder)
    pictures = [draw_image(rng) for _ in range(2)]
    arguments = ["--preprocess-workers", "1", "--log-format", "json", "--log-level", "warning"]
    with Server(str(folder), *arguments) as server:
        request = ask([data_url(p, "png") for p in pictures], QUESTION, max_tokens=10)
        request["model"] = "tiny-llava"
        response = server.post(request)
        assert response.status_code == 200, response.text
        completion = response.json()
        assert server.post(ask([], "hi")).status_code == 404
    events = [json.loads(line) for line in server.lines]
    assert {"core", "worker", "stopped"} <= {event.get("part") for event in events}
    family = family_of(folder)
    prompts = PromptBuilder(folder, family)
    parts = (*(MediaPart(Modality.IMAGE, "") for _ in pictures), TextPart(QUESTION))
    plan = family.plan(ImageHeader(*pictures[0].image.size))
    assert plan is not None
    prompt = prompts.build([Message("user", parts)], [plan.prompt] * len(pictures))
    assert completion["usage"]["prompt_tokens"] == len(prompt.token_ids)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    input_ids = torch.tensor([prompt.token_ids])
    generated = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=10,
        **processor(images=[p.image for p in pictures], return_tensors="pt"),
    )[0, len(prompt.token_ids) :].tolist()
    detokenizer = prompts.detokenizer()
    text = detokenizer.feed(generated) + detokenizer.flush()
    assert completion["choices"][0]["message"]["content"] == text


def test_workers_are_confined(server: Server) -> None:
    wait_until(lambda: server.metric("afferent_store_workers") == 2)
    for worker in server.preprocess_workers():
        status = Path(f"/proc/{worker.pid}/status").read_text()
        assert "Seccomp:\t2" in status
        assert "NoNewPrivs:\t1" in status
        assert worker.nice() == min(19, psutil.Process().nice() + 10)
        data_nbytes, _ = worker.rlimit(psutil.RLIMIT_DATA)
        assert GiB < data_nbytes < 4 * GiB
        assert worker.rlimit(psutil.RLIMIT_NOFILE)[0] < 100


def test_keep_alive_connections_see_refusals_and_answers(
    server: Server, rng: np.random.Generator
) -> None:
    good = ask([data_url(draw_image(rng))], QUESTION)
    with plain_http.Client(base_url=server.url, timeout=60) as client:
        statuses = [
            client.post("/v1/chat/completions", json=body).status_code
            for body in (good, {**good, "model": "no"}, good, {"messages": 3}, good)
        ]
    assert statuses == [200, 404, 200, 400, 200]


def test_whoever_stops_a_start_hears_of_nothing_else() -> None:
    """The signal comes while a worker starts and other processes report that they are ready."""
    command = [sys.executable, "-m", "afferent.cli", "serve", "--port", "0"]
    command += ["--preprocess-workers", "2", "--arena-nbytes", "64MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as starting:
        assert starting.stderr is not None
        lines: list[str] = []
        for line in starting.stderr:
            lines.append(line)
            if " ready: an arena" in line:
                starting.send_signal(signal.SIGINT)
    assert starting.returncode == 0
    (at,) = [number for number, line in enumerate(lines) if " s  stopping " in line]
    assert [line.split()[2] for line in lines[at + 1 :]] == ["stopped"], "".join(lines)


@pytest.mark.timeout(240)
def test_sighup_drains_as_sigterm_does(rng: np.random.Generator) -> None:
    """A terminal that closes may send the signal twice."""
    body = ask([data_url(draw_image(rng))], QUESTION)
    # These tests may run under nohup, and a server inherits that it ignores the signal.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    small = ["--arena-nbytes", "64MiB"]
    with Server(*TINY_ENGINE, *small) as server, ThreadPoolExecutor(1) as threads:
        signal.signal(signal.SIGHUP, before)
        expected = server.post(body).json()["choices"][0]["message"]["content"]
        assert expected
        with suspended(server.find(TINY)):
            answer = threads.submit(server.post, body)
            wait_until(lambda: server.metric("afferent_requests_in_flight") == 1)
            for _ in range(2):
                server.popen.send_signal(signal.SIGHUP)
            wait_until(lambda: "finishing running requests" in server.log())
            wait_until(server.refuses)
        assert answer.result(60).json()["choices"][0]["message"]["content"] == expected
        assert server.popen.wait(60) == 0
        assert "every process has ended" in server.lines[-1]
