"""A stock vLLM, and Afferent in front of a vLLM, on this machine's CPU."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2 as httpx
import pytest

from afferent.store.client.daemon_store import DaemonStore
from tests.pages import Block
from tests.ports import free_port
from tests.server import Server, wait_until
from tools import vllm_env

START_TIMEOUT_S = 300.0
SHAPES = Path(__file__).parents[2] / "src" / "afferent" / "builtin" / "models" / "shapes"
TOOLS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--trust-request-mm-kwargs",
)
"""Arguments that the questions need."""
ENV = {**vllm_env.ENV, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def python() -> Path:
    """Return the interpreter of an environment with vLLM; skip the test if there is none."""
    chosen = os.environ.get("TEST_VLLM_PYTHON")
    found = Path(chosen or vllm_env.python_of(vllm_env.FOLDER)).absolute()
    if not found.exists():
        pytest.skip("there is no environment with vLLM: make setup-vllm")
    return found


def run_inside(*arguments: str) -> str:
    """Run a module of the tests with vLLM's interpreter, and return its output."""
    done = subprocess.run(
        [python(), "-m", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **ENV},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_block(block: Block, folder: Path) -> None:
    """Run a page's program with vLLM's interpreter; vLLM prints lines of its own, too."""
    (file := folder / "example.py").write_text(block.text)
    done = subprocess.run(
        [python(), file],
        cwd=folder,
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert block.printed is not None
    assert block.printed in done.stdout


class Stock:
    """A stock ``vllm serve``, without any variable of Afferent in its environment."""

    def __init__(
        self,
        folder: Path = SHAPES,
        *arguments: str,
        uds: Path | None = None,
        command: Sequence[str] = ("serve",),
        **env: str,
    ) -> None:
        self._command = command
        self._folder, self._arguments, self._uds = folder, arguments, uds
        self._env = {**os.environ, **ENV, **env}
        self.lines: list[str] = []
        self.url = ""

    def __enter__(self) -> Self:
        where = ["--uds", str(self._uds)]
        if self._uds is None:
            port = free_port()
            self.url, where = f"http://127.0.0.1:{port}", ["--port", str(port)]
        command = [python(), "-m", "vllm.entrypoints.cli.main", *self._command, str(self._folder)]
        self.popen = subprocess.Popen(
            [*command, *vllm_env.ARGUMENTS, *self._arguments, *where],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            wait_until(self._answers, timeout_s=START_TIMEOUT_S)
        except BaseException:
            print("\n".join(self.lines[-50:]))
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, 9)
        self.popen.wait()
        self._reader.join(30)
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def _answers(self) -> bool:
        assert self.popen.poll() is None, "vLLM has ended:\n" + "\n".join(self.lines[-50:])
        try:
            if self._uds is not None:
                with socket.socket(socket.AF_UNIX) as sock:
                    return sock.connect_ex(str(self._uds)) == 0
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))


def supervised(
    *arguments: str,
    vllm: Sequence[str] = (),
    model: Path = SHAPES,
    env: Mapping[str, str] | None = None,
) -> Server:
    """Return an Afferent server that starts its own vLLM."""
    engine_args = shlex.join([*vllm_env.ARGUMENTS, *vllm])
    return Server(
        str(model),
        *("--engine", "vllm", "--engine-python", str(python())),
        f"--engine-args={engine_args}",
        *arguments,
        env={**ENV, **(env or {})},
        start_timeout_s=START_TIMEOUT_S,
    )


def is_ready(server: Server) -> bool:
    """Whether all frontends take requests."""
    with contextlib.suppress(Exception):
        return all(server.get("/ready").status_code == 200 for _ in range(4))
    return False


def wait_until_nothing_held(store_path: Path) -> None:
    """Wait until no request pins an object of this store."""
    with DaemonStore(str(store_path), name="looker") as store:
        wait_until(lambda: store.stat().held_nbytes == 0)


def version() -> str:
    """Return vLLM's version."""
    done = subprocess.run(
        [python(), "-c", "from importlib.metadata import version; print(version('vllm'))"],
        capture_output=True,
        check=True,
        text=True,
    )
    return re.sub(r"\s", "", done.stdout)
