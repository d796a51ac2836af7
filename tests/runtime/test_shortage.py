"""Shortages of system resources are reported in one line, with a remedy."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from afferent import cli
from afferent.errors import ConfigError
from afferent.operations.commands import daemons
from afferent.runtime import cgroup, shortage
from afferent.runtime.process import ChildProcess, Launch
from afferent.types import MiB

CLI = [sys.executable, "-m", "afferent.cli"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "x"), "ulimit -n"),
        (OSError(errno.ENFILE, "x"), "fs.file-max"),
        (BlockingIOError(errno.EAGAIN, "x"), "ulimit -u"),
        (OSError(errno.ENOMEM, "x"), "no memory left"),
        (MemoryError(), "no memory left"),
        (OSError(errno.EFBIG, "x"), "ulimit -f"),
        (OSError(errno.ENOSPC, "x", "/srv/x"), "no space is left on the device: /srv/x"),
        (RuntimeError("can't start new thread"), "--pids-limit"),
    ],
)
def test_explain_shortage_names_the_limit(error: Exception, words: str) -> None:
    assert words in shortage.explain(error)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "x"), RuntimeError("x"), KeyError("x")])
def test_explain_other_error_is_empty(error: Exception) -> None:
    assert shortage.explain(error) == ""


def test_check_tasks_counts_what_the_group_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"9 8 0:9 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "pids.current").write_text("10\n")
    monkeypatch.setattr(cgroup, "PROC", tmp_path)
    for limit in ("max", "58"):
        (tmp_path / "pids.max").write_text(limit)
        shortage.check_tasks(num_workers=2, num_frontends=1)
    (tmp_path / "pids.max").write_text("57")
    with pytest.raises(ConfigError, match=r"no more than 57 .* needs 48 more; .*--pids-limit"):
        shortage.check_tasks(num_workers=2, num_frontends=1)


def limited(kind: int, limit: int, *command: str) -> subprocess.CompletedProcess[str]:
    _, hard = resource.getrlimit(kind)
    return subprocess.run(
        [*CLI, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(kind, (limit, hard)),
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "limit", "words"),
    [
        (resource.RLIMIT_NOFILE, 24, "no more than 24 files can be open in a process"),
        (resource.RLIMIT_NOFILE, 200, "a server needs 256"),
        (resource.RLIMIT_FSIZE, 60 * MiB, "files must not be larger than 60.0 MiB"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config check"])
def test_cli_with_small_limit_ends_with_one_line(
    kind: int, limit: int, words: str, command: str
) -> None:
    done = limited(kind, limit, *command.split(), "--port", "0", "--arena-nbytes", "64MiB")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert done.returncode == 2


def test_store_run_with_few_descriptors_ends_with_one_line() -> None:
    done = limited(resource.RLIMIT_NOFILE, 24, "store", "run")
    (line,) = done.stderr.splitlines()
    assert "no more than 24 files can be open in a process" in line
    assert done.returncode == 2


def test_command_that_runs_out_of_descriptors_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(daemons, "find", find)
    assert cli.main(["store", "stat"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no more than ")


def test_child_that_runs_out_of_descriptors_logs_one_line() -> None:
    program = (
        "import sys, resource; from tests.runtime.test_shortage import start;"
        "start(); resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); open('/dev/null')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    (line,) = done.stderr.splitlines()
    assert "no more than 3 files can be open in a process" in line
    assert done.returncode == 1


def start() -> None:
    """Start as a child process does."""
    launch = Launch(
        name="child",
        parent_pid=os.getppid(),
        status_fd=1,
        log_level="warning",
        log_format="text",
        settings=msgspec.Raw(b"\x80"),
    )
    fd = os.memfd_create("launch")
    os.write(fd, msgspec.msgpack.encode(launch))
    os.lseek(fd, 0, os.SEEK_SET)
    sys.argv[1:] = [str(fd)]
    ChildProcess.start()


@pytest.mark.parametrize("command", ["config show", "config show --json", "serve --help all"])
def test_cli_reader_that_leaves_is_no_error(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*CLI, *command.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in (0, 141)
