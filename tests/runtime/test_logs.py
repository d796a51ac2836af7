"""JSON logs: each line that a process writes to stderr is a JSON object."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from afferent.runtime import logs

PROGRAM = """
import logging, sys, threading, warnings
from afferent.runtime import logs
logs.configure("some process", level="info", format="json")
logging.getLogger("mine").info("an event", extra={"number": 3})
print("printed by", "a library", file=sys.stderr)
warnings.warn("a warning")
other = logging.getLogger("transformers")
other.propagate = False
other.addHandler(logging.StreamHandler())
other.warning("logged by a handler of its own")
logs.forward(iter(["of another program\\n", '{"is": "JSON"}\\n']), process="other")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
"""


def run(program: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_everything_printed_is_an_object() -> None:
    events = run(PROGRAM)
    assert [event.get("event") for event in events][:2] == ["an event", "printed by a library"]
    assert {"process": "some process", "level": "info", "number": 3}.items() <= events[0].items()
    assert "a warning" in events[2]["event"]
    last = [event.get("event", event) for event in events[-4:-1]]
    assert last == ["logged by a handler of its own", "of another program", {"is": "JSON"}]
    assert events[-3]["process"] == "other"
    assert events[-1]["level"] == "critical"
    assert "ZeroDivisionError" in events[-1]["exception"]


def test_uncaught_exception_is_one_object() -> None:
    events = run(PROGRAM + "raise ValueError('the end')")
    assert events[-1]["event"] == "an exception ended this process or thread"
    assert events[-1]["exception"].endswith("ValueError: the end")


def test_line_that_comes_in_pieces_is_one_event() -> None:
    inner = io.StringIO()
    lines = logs.JsonLines(inner, "inner")
    assert lines.write("half a li") == len("half a li")
    assert inner.getvalue() == ""
    lines.write("ne\r\n\n{not json}\n")
    events = [json.loads(line) for line in inner.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["half a line", "{not json}"]
    assert {event["process"] for event in events} == {"inner"}


OF_VLLM = """
import sys
from afferent.engines.http_upstream import process
from afferent.engines.http_upstream.launch import ServerProcess
from afferent.runtime import logs
logs.configure("vllm-server", level="info", format="json")
command = ("sh", "-c", "echo on its output; echo on its errors >&2")
settings = ServerProcess(
    title="vLLM",
    process_name="vllm",
    watched_name="vllm-server",
    command=command,
    socket_path=sys.argv[0],
    start_timeout_s=1.0,
)
with process.started(settings):
    for each in process.threading.enumerate():
        if each.name == "output":  # it ends by itself, perhaps already
            each.join()
"""


def test_output_of_vllm_is_an_object_a_line(tmp_path: Path) -> None:
    program = OF_VLLM.replace("sys.argv[0]", repr(str(tmp_path / "socket")))
    events = [(event["process"], event["event"]) for event in run(program)]
    assert events == [("vllm", "on its output"), ("vllm", "on its errors")]
