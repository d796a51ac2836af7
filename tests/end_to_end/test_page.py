"""The live page of a real server, and ``afferent top``: both show its activity."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.server import Server, ask, data_url, wait_until

MODULE = "afferent.operations.live_page.main"
SAME_ORIGIN = {"sec-fetch-site": "same-origin", "content-type": "application/json"}
QUESTION = "What is in the picture?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--ui", "0", "--arena-nbytes", "64MiB") as running:
        yield running


@pytest.fixture
def page(server: Server) -> str:
    return page_of(server)


def page_of(server: Server) -> str:
    """Return the page's address from the server's log."""
    found = [re.search(r" page +ready: (http\S+)/$", line) for line in server.lines]
    return next(match[1] for match in reversed(found) if match)


def picture(seed: int = 1) -> str:
    return data_url(draw_image(np.random.default_rng(seed), colour="red", shape="circle"))


@contextlib.contextmanager
def views(page: str) -> Iterator[Iterator[dict[str, Any]]]:
    with plain_http.stream("GET", f"{page}/views", headers=SAME_ORIGIN, timeout=30) as stream:
        assert stream.status_code == 200

        def each() -> Iterator[dict[str, Any]]:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

        yield each()


def first_view(page: str) -> dict[str, Any]:
    with views(page) as seen:
        return next(seen)


def test_a_request_is_seen_with_its_stages(server: Server, page: str) -> None:
    answer = server.post(ask([picture()], QUESTION))
    request_id = answer.headers["x-request-id"]
    seen = first_view(page)
    assert (seen["model"], seen["num_frontends"], seen["problem"]) == ("shapes", 1, "")
    (request,) = [each for each in seen["ended"] if each["id"] == request_id]
    assert (request["outcome"], request["media"], request["items"]) == (
        *("ok", "image"),
        ["1 image made"],
    )
    stages = {stage["stage"]: stage for stage in request["stages"]}
    assert {"read body", "decode", "accept", "prefill"} <= stages.keys()
    assert len({stage["process"].split()[1] for stage in stages.values()}) >= 4
    assert all(
        stage["start_s"] >= 0 and stage["start_s"] + stage["seconds"] <= request["seconds"] + 0.05
        for stage in request["stages"]
    )
    assert {kind["kind"] for kind in seen["kinds"]} == {"raw", "features", "embeddings", "records"}
    assert {process["name"] for process in seen["processes"]} >= {"frontend-0", "core"}
    assert "page" not in {process["name"] for process in seen["processes"]}


def test_views_come_once_a_second_and_have_rates(server: Server, page: str) -> None:
    with views(page) as seen:
        start_s = time.monotonic()
        next(seen)
        for _ in range(3):
            server.post(ask([picture()], QUESTION))
        third = [next(seen) for _ in range(3)][-1]
        took_s = time.monotonic() - start_s
    assert 2.0 <= took_s < 10
    way = {station["name"]: station for station in third["way"]}
    (ended, *_) = way["Requests"]["figures"]
    assert ended["label"] == "ended"
    assert ended["value"] > 0
    assert third["hit_rate"] is not None
    saved = third["savings"]
    assert saved["num_items"]["hit"] >= 1
    assert saved["num_unmeasured"] == 0
    assert saved["saved_s"] > 0
    assert saved["copied_nbytes"] > saved["features_nbytes"] > 0


def test_a_question_of_the_page_is_answered(server: Server, page: str) -> None:
    body = ask([picture(2)], QUESTION, stream=True)
    with plain_http.stream(
        "POST", f"{page}/ask", headers=SAME_ORIGIN, json=body, timeout=60
    ) as answer:
        assert answer.status_code == 200
        request_id = answer.headers["x-request-id"]
        chunks = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert chunks.pop() == "[DONE]"
    pieces = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces).strip() == "a red circle"
    wait_until(lambda: request_id in {each["id"] for each in first_view(page)["ended"]})


def test_strangers_are_refused(page: str) -> None:
    port = page.rpartition(":")[2]
    rebound = plain_http.get(f"{page}/views", headers={"host": f"evil.example:{port}"})
    assert rebound.status_code == 421
    other = {"content-type": "application/json", "origin": "https://evil.example"}
    for site in ({}, {"sec-fetch-site": "cross-site"}):  # of an old browser, and of a new one
        assert plain_http.post(f"{page}/ask", headers={**other, **site}, json={}).status_code == 403


def test_nobody_is_asked_while_nobody_looks(server: Server, page: str) -> None:
    first_view(page)
    with server.store() as store:
        wait_until(lambda: "page" not in {client.name for client in store.list_clients()})
    (process,) = server.find(MODULE)
    assert process.nice() == min(19, psutil.Process().nice() + 10)


def top(server: Server, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "afferent.cli", "top", *arguments]
    return [*command, "--pid", str(server.popen.pid)]


def test_top_without_a_terminal(server: Server) -> None:
    server.post(ask([picture(3)], QUESTION))
    done = subprocess.run(
        top(server, "--interval", "0.1"), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for words in ("shapes", "Preprocessing", "features", "chat/completions", "1 image made"):
        assert words in done.stdout


def test_top_in_a_terminal_until_q(server: Server) -> None:
    """It draws a frame at each change of the size, and restores the terminal."""
    far_end, terminal = pty.openpty()
    command = top(server, "--interval", "0.2")
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, **streams, env={**os.environ, "TERM": "xterm"}) as child:
        os.close(terminal)
        try:
            shown = read_until(far_end, "Preprocessing")
            child.send_signal(signal.SIGWINCH)
            shown += read_until(far_end, "Preprocessing")
            os.write(far_end, b"q")
            shown += read_until(far_end, "\x1b[?1049l")
            assert child.wait(30) == 0
        finally:
            child.kill()
            os.close(far_end)
    assert shown.startswith("\x1b[?1049h")


def read_until(fd: int, words: str, *, timeout_s: float = 30.0) -> str:
    shown, deadline = "", time.monotonic() + timeout_s
    while words not in shown:
        ready, _, _ = select.select([fd], [], [], deadline - time.monotonic())
        assert ready, f"not shown: {words!r} in {shown!r}"
        shown += os.read(fd, 1 << 16).decode(errors="replace")
    return shown


def test_top_of_no_server() -> None:
    command = [sys.executable, "-m", "afferent.cli", "top", "--pid", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --pid 1: is no server\n"


def test_frontends_are_replaced_and_the_page_stays(server: Server, page: str) -> None:
    (before,) = server.find(MODULE)
    command = [sys.executable, "-m", "afferent.cli", "restart", "frontends"]
    command += ["--pid", str(server.popen.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "page" in done.stdout) == (0, False)
    seen = first_view(page)
    assert (seen["num_frontends"], seen["problem"], seen["ended"]) == (1, "", [])
    assert server.find(MODULE) == [before]


def test_a_page_that_dies_comes_back_and_nobody_else_notices(server: Server, page: str) -> None:
    (process,) = server.find(MODULE)
    process.kill()
    assert server.post(ask([picture()], QUESTION)).status_code == 200
    wait_until(lambda: [each.pid for each in server.find(MODULE)] not in ([], [process.pid]))
    wait_until(lambda: _answers(page))
    assert first_view(page)["problem"] == ""


def _answers(page: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return plain_http.get(f"{page}/about").status_code == 200
    return False
