"""Access to the sockets of a process, and the removal of leftovers."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from afferent.errors import ConfigError
from afferent.runtime import sockets, wire
from afferent.runtime.sockets import SocketFolder, digits_of, new_address, remove_left
from tests.others import another_user, needs_root

HOLDS = """
import sys
from afferent.runtime.sockets import new_address
print(new_address("store"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder with a short path, as that of `tmp_path` may be too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process with its own folder in this one, until its input ends."""
    env = {**os.environ, "XDG_RUNTIME_DIR": "", "TMPDIR": str(folder)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDS], env=env, **pipes) as running:
        try:
            yield running
        finally:
            running.kill()


def folder_of(running: subprocess.Popen[str]) -> Path:
    assert running.stdout is not None
    return Path(running.stdout.readline().strip()).parent


def test_an_address_says_whose_it_is() -> None:
    address = new_address("store")
    digits = digits_of(address, "store")
    assert digits
    assert address.endswith(f"/store-{digits}.sock")
    assert digits_of(address, "core") is None
    assert digits_of("/run/afferent/store.sock", "store") is None
    assert Path(address).parent.stat().st_mode & 0o777 == 0o700
    assert new_address("store") != address


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * sockets.MAX_PATH_NBYTES)
    with pytest.raises(ConfigError, match=f"107 bytes at most, and {path} has {len(str(path))}"):
        wire.listen(str(path))


def test_a_folder_is_removed_by_its_process(short_path: Path) -> None:
    with holder(short_path) as running:
        folder = folder_of(running)
        assert folder.parent == short_path
        assert running.stdin is not None
        running.stdin.close()
        assert running.wait(60) == 0
    assert not folder.exists()


def test_what_a_killed_process_has_left_is_removed_by_the_next(short_path: Path) -> None:
    with holder(short_path) as killed, holder(short_path) as living:
        left, kept = folder_of(killed), folder_of(living)
        with wire.listen(str(left / "store-00000000.sock")):
            pass
        killed.kill()
        killed.wait(60)
        assert left.exists()
        others = short_path / "afferent-sockets-open"
        others.mkdir(mode=0o755)
        remove_left(short_path)
        assert sorted(short_path.iterdir()) == sorted([kept, others])


def test_who_begins_and_who_tidies_up_agree(tmp_path: Path) -> None:
    """The owner locks its folder first, or creates a new one if the cleanup was faster."""
    first = SocketFolder.create(tmp_path)
    second = SocketFolder.create(tmp_path)
    remove_left(tmp_path)
    assert first.path.exists()
    assert second.path.exists()
    first.remove()
    assert not first.path.exists()
    second.remove()


def test_a_forked_child_leaves_its_parents_folder_alone(short_path: Path) -> None:
    code = (
        "import os; from afferent.runtime.sockets import new_address; ours = new_address('store')\n"
        "if os.fork() == 0:\n    assert os.path.dirname(new_address('store')) != "
        "os.path.dirname(ours)\nelse:\n    os.wait(); assert os.path.isdir(os.path.dirname(ours))"
    )
    env = {**os.environ, "XDG_RUNTIME_DIR": "", "TMPDIR": str(short_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    assert not list(short_path.iterdir())


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_users_own_folder_is_taken_if_it_is_private(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    given = short_path / "runtime"
    given.mkdir()
    given.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(given))
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: str(short_path))
    assert sockets._parent() == (given if mode == 0o700 else short_path)


def test_a_long_path_for_what_is_temporary_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: str(long))
    assert sockets._parent() == Path("/tmp")


@needs_root
def test_another_user_can_not_even_connect() -> None:
    address = new_address("test")

    def tries(pipe: Connection) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            pipe.send((os.getuid(), sock.connect_ex(address)))

    with wire.listen(address) as listener:
        with another_user(tries) as told:
            assert told.poll(60)
            uid, code = told.recv()
        assert (uid != os.getuid(), code) == (True, errno.EACCES)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(address)
