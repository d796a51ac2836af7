"""What a confined process can't do, tried in one."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afferent.errors import ConfigError
from afferent.preprocess import sandbox

TRY = """
import json, os, resource, socket, subprocess, sys, threading
import numpy as np
from afferent.preprocess import sandbox

before = socket.socketpair()
asked, answered = threading.Event(), threading.Event()

def old():
    asked.wait()
    attempt("old thread", lambda: socket.socket(socket.AF_UNIX))
    answered.set()

old_thread = threading.Thread(target=old)
old_thread.start()
sandbox.enter(memory_nbytes=64 << 20)
outcomes = {}

def attempt(name, call):
    try:
        call()
    except BaseException as error:
        outcomes[name] = type(error).__name__
    else:
        outcomes[name] = "done"

asked.set()
old_thread.join()
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("chmod", lambda: os.fchmod(os.open(__file__, os.O_RDONLY), 0o777))
attempt("limit", lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE))
attempt("inet", lambda: socket.socket(socket.AF_INET))
attempt("unix", lambda: socket.socket(socket.AF_UNIX))
attempt("run", lambda: subprocess.run(["/bin/true"], check=True))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("write", lambda: open(sys.argv[1] + "/new", "w"))
attempt("append", lambda: open(__file__, "a"))
attempt("remove", lambda: os.unlink(__file__))
attempt("rename", lambda: os.rename(__file__, sys.argv[1] + "/other"))
attempt("mkdir", lambda: os.mkdir(sys.argv[1] + "/folder"))
attempt("memory", lambda: np.ones(128 << 20, np.uint8))

attempt("read", lambda: open(__file__).read())
attempt("some memory", lambda: np.ones(16 << 20, np.uint8))
attempt("old socket", lambda: (before[0].send(b"x"), before[1].recv(1)))
thread = threading.Thread(target=int)
attempt("thread", lambda: (thread.start(), thread.join()))
attempt("files", lambda: [os.dup(0) for _ in range(64)])
print(json.dumps(outcomes), flush=True)
if sys.argv[2:]:
    sandbox.allow_cpu(0.2)
    while True:
        pass
"""


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_is_left_to_a_worker(is_busy: bool, tmp_path: Path) -> None:
    script = tmp_path / "try.py"
    script.write_text(TRY)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *(["busy"] if is_busy else [])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (-signal.SIGXCPU if is_busy else 0), done.stderr
    outcomes = json.loads(done.stdout)
    allowed = {"read", "some memory", "old socket", "thread"}
    assert {name for name, outcome in outcomes.items() if outcome == "done"} == allowed
    refused = {"PermissionError"}
    assert {outcomes[n] for n in ("inet", "unix", "run", "exec", "write", "append")} == refused
    assert {outcomes[n] for n in ("remove", "rename", "mkdir", "chmod")} == refused
    assert {outcomes[n] for n in ("kill", "limit", "old thread")} == refused
    assert outcomes["memory"] in ("MemoryError", "_ArrayMemoryError")
    assert outcomes["files"] == "OSError"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["try.py"]


def test_the_filter_names_calls_of_this_machine_and_the_other() -> None:
    here = sandbox._filter(platform.machine())
    programs = {machine: sandbox._filter(machine) for machine in ("x86_64", "aarch64")}
    assert here in programs.values()
    for program in programs.values():
        # Every jump lands within the program, and its last lines are the verdicts.
        for index, (_, if_true, if_false, _) in enumerate(program):
            assert index + 1 + max(if_true, if_false) < len(program) or index == len(program) - 1
        assert [line[0] for line in program[-2:]] == [sandbox._RETURN] * 2
    with pytest.raises(ConfigError, match="s390x"):
        sandbox._filter("s390x")
