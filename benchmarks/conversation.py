"""Cost of the turns of a conversation with an image in each.

A conversation has forty turns, each with a new image and a question, and answers of a few tokens
from the built-in model. Sides: *again* sends all messages at each turn (chat completions); *by id*
sends the new message alone and names the answer before it (Responses). The baseline, *uncached*,
sends all messages to a server without a prefix cache.

A sample is one conversation: the time to the first token and the processor time of the frontends,
the store daemon and the preprocess workers, early (turns 2 to 5) and late (37 to 40). After each of
these turns the same body is sent with the name of no model: the server reads, decodes and parses
it, and refuses it. ``read_ms`` is the processor time of that, and ``cpu_ratio`` compares the time
beyond it.

Expected before the measurement: late first tokens come as early as early ones by id, and 1.5 times
as late again, as the server reads and looks up 39 more images; without a prefix cache ten times as
late. Processor time late beside early, beyond reading the bytes: 1.5 by id and again.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from afferent.conformance.images import draw_image
from benchmarks.children import serving
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from tests.images import encoded
from tests.server import data_url

QUESTION = "What does a late turn of a conversation cost beside an early one?"
COLUMNS = (
    *("side", "early_ms", "late_ms", "ratio"),
    *("early_cpu_ms", "late_cpu_ms", "early_read_ms", "late_read_ms", "cpu_ratio"),
)
NUM_TURNS = 40
_TURNS_AT_EACH_END = 4
_ENGINE = ("afferent.builtin.engine.core", "afferent.builtin.engine.worker")
_SIDES = {"again": (32_768, False), "by id": (32_768, True), "uncached": (0, False)}
"""Tokens in the prefix cache, and whether an answer is named."""

AfterSample = Callable[[], None]


@dataclass(slots=True)
class _Turns:
    """Milliseconds of each turn of a conversation."""

    first_token_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    read_ms: list[float] = field(default_factory=list)


def num_steps(*, quick: bool) -> int:
    return len(_SIDES) * (_num_samples(quick=quick) + 1)


def run(*, quick: bool, after_sample: AfterSample, turns: int = NUM_TURNS) -> Report:
    """Run the benchmark with conversations of so many turns."""
    report = Report("conversation", QUESTION)
    report.notes.append(
        "early: turns 2 to 5; late: the last four; cpu: frontends, store and preprocess workers; "
        "read: of that, reading and parsing the bytes; cpu_ratio: late / early, beyond that"
    )
    meter = BusyMeter()
    with contextlib.ExitStack() as stack:
        servers = {kept: stack.enter_context(_server(kept)) for kept in (32_768, 0)}
        pictures = itertools.count()
        sides = {
            name: partial(_conversation, servers[kept], pictures, turns, is_by_id=is_by_id)
            for name, (kept, is_by_id) in _SIDES.items()
        }
        samples = alternate(sides, num_samples=_num_samples(quick=quick), after_sample=after_sample)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    for name, conversations in samples.items():
        measured = _measured(conversations)
        report.rows.append(Row({"side": name}, measured))
    for name, what, most in (
        ("by id", "ratio", 1.2),
        ("by id", "cpu_ratio", 1.5),
        ("again", "cpu_ratio", 1.5),
    ):
        row = next(row for row in report.rows if row.keys["side"] == name)
        value = row.median(what)
        report.goals.append(Goal(f"{name}: {what} at most {most:g}", value <= most, value))
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def _measured(conversations: list[_Turns]) -> dict[str, list[float]]:
    early, late = slice(1, 1 + _TURNS_AT_EACH_END), slice(-_TURNS_AT_EACH_END, None)
    found: dict[str, list[float]] = {}
    for prefix, values in (
        ("", [each.first_token_ms for each in conversations]),
        ("cpu_", [each.cpu_ms for each in conversations]),
        ("read_", [each.read_ms for each in conversations]),
    ):
        found[f"early_{prefix}ms"] = [statistics.mean(each[early]) for each in values]
        found[f"late_{prefix}ms"] = [statistics.mean(each[late]) for each in values]
    ends, begins = found["late_ms"], found["early_ms"]
    found["ratio"] = [end / begin for begin, end in zip(begins, ends, strict=True)]
    beyond = {
        when: [
            cpu - read
            for cpu, read in zip(found[f"{when}_cpu_ms"], found[f"{when}_read_ms"], strict=True)
        ]
        for when in ("early", "late")
    }
    found["cpu_ratio"] = [
        end / begin for begin, end in zip(beyond["early"], beyond["late"], strict=True)
    ]
    return {name: found[name] for name in COLUMNS[1:]}


@contextlib.contextmanager
def _server(kept: int) -> Iterator[tuple[int, list[psutil.Process]]]:
    """Run a server; yield its port, and its processes without those of the engine."""
    with serving("--prefix-cache-tokens", str(kept)) as (port, processes):
        yield port, [each for each in processes if not _is_engine(each)]


def _is_engine(process: psutil.Process) -> bool:
    return any(part.startswith(_ENGINE) for part in process.cmdline())


def _conversation(
    server: tuple[int, list[psutil.Process]],
    pictures: Iterator[int],
    turns: int,
    *,
    is_by_id: bool,
) -> _Turns:
    port, processes = server
    found, previous = _Turns(), ""
    said: list[dict[str, Any]] = []
    for turn in range(turns):
        url = data_url(encoded(draw_image(np.random.default_rng(next(pictures))).image, "PNG"))
        said = [] if is_by_id else said
        said.append(_message(url, is_by_id=is_by_id))
        body: dict[str, Any] = {"model": "shapes", "stream": True, "temperature": 0}
        if is_by_id:
            path = "/v1/responses"
            body |= {"input": said, "max_output_tokens": 8}
            body |= {"previous_response_id": previous} if previous else {}
        else:
            path = "/v1/chat/completions"
            body |= {"messages": said, "max_tokens": 8}
        before, start_s = cpu_ms(processes), time.perf_counter()
        text, previous, first_s = _streamed(port, path, json.dumps(body))
        found.first_token_ms.append(1e3 * (first_s - start_s))
        found.cpu_ms.append(cpu_ms(processes) - before)
        is_measured = 0 < turn <= _TURNS_AT_EACH_END or turn >= turns - _TURNS_AT_EACH_END
        unknown = json.dumps(body | {"model": "none"})
        found.read_ms.append(_refused_ms(port, path, unknown, processes) if is_measured else 0.0)
        said.append({"role": "assistant", "content": text})
    return found


def _refused_ms(port: int, path: str, body: str, processes: list[psutil.Process]) -> float:
    """Return the processor time of a request that is read, and refused."""
    before_ms, connection = cpu_ms(processes), http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    if answer.status != 404:
        raise RuntimeError(f"a model that does not exist was answered with {answer.status}")
    return cpu_ms(processes) - before_ms


def _message(url: str, *, is_by_id: bool) -> dict[str, Any]:
    text, prefix = "What is in the picture?", "input_" if is_by_id else ""
    image: dict[str, Any] = {"type": "input_image" if is_by_id else "image_url"}
    image["image_url"] = url if is_by_id else {"url": url}
    return {"role": "user", "content": [image, {"type": f"{prefix}text", "text": text}]}


def _streamed(port: int, path: str, body: str) -> tuple[str, str, float]:
    """Return an answer's text, its id, and the time of its first piece."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    text, answer_id, first_s = "", "", 0.0
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"a turn was answered with {answer.read()[:500]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            answer_id = answer_id or event.get("id") or event.get("response", {}).get("id", "")
            choices = event.get("choices") or [{}]
            piece = choices[0].get("delta", {}).get("content", "") or event.get("delta", "")
            if piece and not first_s:
                first_s = time.perf_counter()
            text += piece
    return text, answer_id, first_s


def cpu_ms(processes: list[psutil.Process]) -> float:
    """Return the processor time of all threads; more exact than the ticks of ``/proc/PID/stat``."""
    tasks = [task for each in processes for task in Path(f"/proc/{each.pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6
