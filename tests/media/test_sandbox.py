"""Operations that a confined process can't do, attempted in such a process."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afferent.errors import ConfigError
from afferent.media.workers import seccomp
from afferent.media.workers.launch import ENV
from tests.media import golden_features as golden

TRY = """
import json, os, resource, socket, subprocess, sys, threading
import numpy as np
from afferent.media.workers import sandbox

before = socket.socketpair()
asked, answered = threading.Event(), threading.Event()

def old():
    asked.wait()
    attempt("old thread", lambda: socket.socket(socket.AF_UNIX))
    answered.set()

sandbox.drop_capabilities()
old_thread = threading.Thread(target=old)
old_thread.start()
sandbox.enter(memory_nbytes=64 << 20, runs_foreign_code=True)
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
        env={**os.environ, **ENV},  # without threads of numpy
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


def attempted(what: str) -> dict[str, str]:
    """Run a function of `tests.media.confined`; return its outcomes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.media.confined", what],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **ENV},
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


ALLOWED = """
    access brk clock_getres clock_gettime clock_nanosleep close dup dup2 dup3 exit exit_group
    faccessat faccessat2 fstat futex getcpu getcwd getdents64 getegid geteuid getgid getitimer
    getpid getppid getrandom getrlimit getrusage getsockname getsockopt gettid gettimeofday getuid
    lseek lstat mremap munmap nanosleep newfstatat pause poll ppoll pread64 pselect6 read readlink
    readlinkat readv recvfrom recvmsg restart_syscall rseq rt_sigaction rt_sigprocmask
    rt_sigreturn sched_getaffinity sched_yield select sendmsg sendto set_robust_list
    set_tid_address setitimer shutdown sigaltstack stat statx sysinfo time times uname write
    writev
"""
"""System calls that a confined process may make with arguments of -1. Each further call gives more
power to a decoder that an attacker controls.
"""
ATTACKS = {
    "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297,
    "tkill": 200,
    "unshare": 272,
    "setns": 308,
    "mount": 165,
    "chroot": 161,
    "mq_open": 240,
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "setxattr": 188,
    "utimensat": 280,
    "add_key": 248,
    "keyctl": 250,
    "fork": 57,
    "vfork": 58,
    "memfd_create": 319,
    "ftruncate": 77,
    "fallocate": 285,
    "pwrite64": 18,
    "setpriority": 141,
    "sched_setaffinity": 203,
    "setrlimit": 160,
    "userfaultfd": 323,
    "perf_event_open": 298,
    "socketpair": 53,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "clone3": 435,
    "openat2": 437,
}
"""Numbers of system calls on x86-64."""

UPROBES = {335, 336}
"""The kernel's own returns from probes, which filters don't see; other callers get an error or
SIGILL.
"""

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers are of x86-64")


@needs_x86
def test_each_system_call_but_the_allowed_ones_is_refused() -> None:
    """The error is EPERM, or ENOSYS for new calls, as if the kernel lacked them."""
    outcomes = attempted("calls")
    refused = {
        int(number)
        for number, outcome in outcomes.items()
        if outcome == ("ENOSYS" if int(number) >= seccomp.FIRST_NEW else "EPERM")
    }
    may = {seccomp.ALLOWED[name][0] for name in ALLOWED.split()}
    assert {int(number) for number in outcomes} - refused - UPROBES == may
    assert set(ALLOWED.split()) == set(seccomp.ALLOWED)
    assert set(ATTACKS.values()) <= refused
    assert len(outcomes) > 470


@needs_x86
def test_arguments_decide_about_some_calls() -> None:
    outcomes = attempted("arguments")
    for attempt, outcome in outcomes.items():
        assert outcome == ("EPERM" if attempt.startswith("-") else ""), attempt
    assert len(outcomes) > 25


def test_confined_code_may_start_threads() -> None:
    """The decoder of HEIC needs one."""
    assert attempted("threads") == {"known": "", "foreign": ""}


def test_threads_have_an_end() -> None:
    """The limit is the memory for stacks, or the number of tasks."""
    assert 1 <= int(attempted("bomb")["threads"]) < 2_000


def test_a_log_does_not_fill_the_disk() -> None:
    assert attempted("log") == {"log": "EFBIG"}


def test_root_keeps_no_capability() -> None:
    none = " ".join(["0" * 16] * 2)
    assert attempted("capabilities") == {"held": none}


@pytest.mark.skipif(os.getuid() != 0, reason="others have no capabilities")
def test_second_thread_keeps_no_capability() -> None:
    """capset(2) changes one thread only: other threads have to be started after it."""
    none = " ".join(["0" * 16] * 2)
    found = attempted("capabilities_of_threads")
    assert found["started after"] == f"{none}, {none}"
    assert found["started before"].startswith("ConfigError: a thread ")


def test_each_decoder_and_family_works_confined() -> None:
    """The results are the same as outside of the sandbox."""
    if golden.recorded() is None:
        pytest.skip("no features are recorded for this kind of machine")
    outcome = json.loads(attempted("corpus")["features"])
    assert outcome["num"] > 180
    assert outcome["changed"] == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("runs_foreign_code", [False, True])
def test_each_jump_of_the_filter_lands_within_it(machine: str, runs_foreign_code: bool) -> None:
    program = seccomp.program(machine, pid=7, runs_foreign_code=runs_foreign_code)
    for index, (code, if_true, if_false, _) in enumerate(program):
        assert index + 1 + max(if_true, if_false) < len(program) or index == len(program) - 1
        assert max(if_true, if_false) < 256
        assert (code & 7 == 5) or if_true == if_false == 0
    assert program[-1][0] == seccomp._RETURN


def test_a_machine_whose_calls_are_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="s390x"):
        seccomp.program("s390x", pid=7, runs_foreign_code=False)
