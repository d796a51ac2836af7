"""The files of a killed vLLM are removed; those of other programs stay."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from afferent.engines.http_upstream.launch import ServerProcess
from afferent.engines.http_upstream.process import started
from afferent.engines.vllm.kind import VllmUpstream

pytestmark = pytest.mark.timeout(60)

LEAVES = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
out, attached = sys.argv[1:]
memory = SharedMemory(create=True, size=4096)
other = SharedMemory(name=attached)
lock = multiprocessing.get_context("spawn").Lock()
names = [memory.name, "sem." + lock._semlock.name.lstrip("/"), os.environ["VLLM_RPC_BASE_PATH"]]
with open(out + ".new", "w") as file:
    file.write("\\n".join(names))
os.rename(out + ".new", out)
sys.stdin = open(sys.argv[1] + ".fifo")
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def others() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    with contextlib.suppress(FileNotFoundError):
        memory.unlink()


def process_of(command: tuple[str, ...], folder: Path) -> ServerProcess:
    return ServerProcess(
        title="vLLM",
        process_name="vllm",
        watched_name="vllm-server",
        command=command,
        socket_path=str(folder / "socket"),
        start_timeout_s=10.0,
        folder_variables=VllmUpstream.folder_variables,
    )


@pytest.mark.parametrize("is_noted", [True, False])
def test_shared_memory_of_a_killed_vllm_is_removed_and_of_others_stays(
    is_noted: bool, others: SharedMemory, tmp_path: Path
) -> None:
    """vLLM is killed after its files were noted, or while it is ended."""
    out = tmp_path / "names"
    os.mkfifo(f"{out}.fifo")
    command = (sys.executable, "-c", LEAVES, str(out), others.name)
    settings = process_of(command, tmp_path)
    with started(settings) as (vllm, leftovers):
        descriptor = os.open(f"{out}.fifo", os.O_WRONLY)  # blocks until the names are written
        segment, semaphore, folder = out.read_text().splitlines()
        files = [Path("/dev/shm") / name for name in (segment, semaphore)]
        assert all(file.exists() for file in files)
        later = SharedMemory(create=True, size=4096)
        if is_noted:
            leftovers.look()
            os.killpg(vllm.pid, signal.SIGKILL)
            vllm.wait()
    os.close(descriptor)
    try:
        assert not any(file.exists() for file in files)
        for memory in (others, later):
            assert (Path("/dev/shm") / memory.name).exists()
        assert Path(folder).is_dir()
    finally:
        later.close()
        later.unlink()


def test_operator_may_say_where_sockets_are(
    others: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    out = tmp_path / "names"
    os.mkfifo(f"{out}.fifo")
    command = (sys.executable, "-c", LEAVES, str(out), others.name)
    settings = process_of(command, tmp_path)
    with started(settings):
        # While this is open, the process runs: at its end, its files are removed.
        descriptor = os.open(f"{out}.fifo", os.O_WRONLY)
        assert out.read_text().splitlines()[2] == str(tmp_path)
    os.close(descriptor)
