"""Invalid settings: each is refused in one line, with status 2, and no process is started.

``afferent config check`` and ``afferent serve`` print the same words.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from afferent import cli
from tests.callbacks import slowness
from tests.wrong_folders import FOLDERS, make_folder

_STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec")
_started: list[str] | None = None
LIMIT_S = 3.0
"""Processor time of a refusal, on the machine of `tests.callbacks.slowness`."""


def _audit(event: str, arguments: object) -> None:
    if _started is not None and event in _STARTS:
        _started.append(f"{event} {arguments}")


sys.addaudithook(_audit)


@dataclass(frozen=True, slots=True)
class Wrong:
    """Invalid settings, and words that the error line contains."""

    words: list[str]
    flags: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    file: str = ""

    def __str__(self) -> str:
        return f"{self.flags}{self.file}{self.environ or ''}".replace("\n", " ")[:60]


def flags(given: str, *words: str) -> Wrong:
    return Wrong([*words], flags=given)


def environ(name: str, value: str, *words: str) -> Wrong:
    return Wrong([*words], environ={name: value})


def toml(text: str, *words: str) -> Wrong:
    return Wrong([*words], file=text)


KEY = "k" * 20
TENANT = f'[[tenants]]\nname = "a"\napi_keys = ["{KEY}"]\n'

WRONG = [
    # Flags: names
    flags("--prot 1", "--prot", "--port?"),
    flags("--tp-size 2", "--tp-size", "--tensor-parallel-size"),
    flags("--model-path x", "--model-path", "MODEL"),
    flags("--model a b", "MODEL b", "--model a"),
    flags("--gpu-memory-utilization 0.9", "--kv-cache-tokens and --arena-nbytes"),
    flags("--limit-mm-per-prompt x", "--max-images, --max-videos and --max-audio-clips"),
    flags("--dtype half", "--dtype", "the type that its weights have"),
    flags("--trust-remote-code", "no code of a model's folder is run"),
    flags("--enforce-eager", "--engine vllm", "--engine-args"),
    flags("--engine vllm --max-model-len 9", "--max-model-len", "--engine-args"),
    flags("--ssl-keyfile x", "TLS", "docs/deploying.md"),
    flags("shapes shapes", "one argument too many"),
    flags("--port", "--port", "expected one argument"),
    # Flags: values
    flags("--port x", "--port x", "a whole number, at least 0, at most 65535"),
    flags("--port 70000", "--port 70000", "at most 65535"),
    flags("--port 80.5", "--port 80.5", "a whole number"),
    flags("--frontends 65", "--frontends 65", "at least 0, at most 64"),
    flags("--preprocess-memory-nbytes 9", "--preprocess-memory-nbytes 9", "at least 64MiB, or 0"),
    flags("--preprocess-workers -1", "--preprocess-workers -1", "at least 0"),
    flags("--log-level loud", "--log-level loud", "debug, info, warning, error"),
    flags("--log-format xml", "--log-format xml", "text, json"),
    flags("--processor slow", "--processor slow", "fast, reference"),
    flags("--unknown-fields keep", "--unknown-fields keep", "ignore, refuse"),
    flags("--arena-nbytes 2GB", "--arena-nbytes 2GB", "write 2GiB, or 2000000000 bytes"),
    flags("--arena-nbytes 256mb", "--arena-nbytes 256mb", "write 256MiB, or 256000000 bytes"),
    flags("--arena-nbytes 2XB", "--arena-nbytes 2XB", "KiB, MiB, GiB or TiB, such as 512MiB"),
    flags("--arena-nbytes 1TiB", "an arena of 1024.0 GiB", "choose a smaller --arena-nbytes"),
    flags("--arena-nbytes 1", "--arena-nbytes 1", "at least 1MiB, or 0"),
    flags("--arena-nbytes 900GiB", "900.0 GiB", "--arena-nbytes"),
    flags("--max-model-len 99999", "--max-model-len 99,999", "32,768"),
    flags("--max-model-len 512 --kv-cache-tokens 256", "--max-model-len", "--kv-cache-tokens"),
    flags("--kv-cache-tokens 10", "--kv-cache-tokens 10", "at least 256, or 0"),
    flags("--max-model-len 10", "--max-model-len 10", "at least 64, or 0"),
    flags(
        "--arena-nbytes 1GiB --max-body-nbytes 1GiB",
        *("--max-body-nbytes 1GiB", "256 MiB (--raw-share 0.25 of 1,024 MiB)"),
        *("choose 341MiB at most", "--arena-nbytes 3072MiB"),
    ),
    flags(
        "--arena-nbytes 1GiB --max-video-nbytes 257MiB",
        *("--max-video-nbytes 257MiB", "choose 256MiB at most", "--arena-nbytes 1028MiB"),
    ),
    flags("--tensor-parallel-size 3", "4 attention heads", "--tensor-parallel-size"),
    flags("--raw-share 0.9 --embeddings-share 0.2", "--raw-share 0.9", "below 1 in all"),
    flags("--raw-share 1", "--raw-share 1", "below 1"),
    flags("--request-timeout-s -1", "--request-timeout-s -1", "at least 0"),
    flags("--frozen-timeout-s 1", "--frozen-timeout-s 1", "at least 3"),
    flags("--host http://0.0.0.0", "--host http://0.0.0.0", "without a port or a scheme"),
    flags("--host 192.0.2.1", "--host 192.0.2.1", "Cannot assign requested address"),
    flags("--ui 70000", "--ui 70000", "at most 65535"),
    flags("--ui 0 --ui-host 0.0.0.0", "--ui-host 0.0.0.0", "--ui-key"),
    flags(f"--ui 0 --ui-host 192.0.2.1 --ui-key {KEY}", "--ui 0", "Cannot assign"),
    flags("--ui 0 --ui-key short", "--ui-key", "16 to 256"),
    flags("--max-images 0", "--max-images 0", "at least 1"),
    flags("--file-roots /nope", "--file-roots /nope", "must be a folder"),
    flags("--file-roots media", "--file-roots media", "absolute"),
    flags("--files-store /no/such/parent", "--files-store /no/such/parent", "must be a folder"),
    flags("--files-store media", "--files-store", "absolute path"),
    flags("--files-store memory://x", "--files-store", "would be lost"),
    flags("--fetch-allow media", "--fetch-allow media", "HOST:PORT"),
    flags("--cors-origin example.org", "--cors-origin example.org", "https://example.org"),
    flags("--store-path /nope/store", "--store-path /nope/store", "No such file"),
    flags(f"--store-path /tmp/{'x' * 120}", "--store-path", "107 bytes"),
    flags("--engine refrence", "--engine refrence", "reference, render, vllm, or MODULE:FACTORY"),
    flags("--engine no_such:Engine", "--engine no_such:Engine", "No module named"),
    flags("--engine json:loads", "--engine json:loads"),
    flags("--engine vllm --engine-url ftp://x", "--engine-url ftp://x", "unix:PATH"),
    flags("--engine vllm --engine-url http://a:1", "--engine-url", "--store-path"),
    flags("--engine openai", "--engine openai needs --engine-url"),
    flags("--engine openai --engine-url http://a/v1", "--engine-url http://a/v1", "http://HOST"),
    flags(
        "--engine openai --engine-url http://a --engine-names vllm --engine-stream-nbytes 1MiB",
        "--engine-stream-nbytes and --engine-names",
    ),
    flags("--engine openai --engine-url http://a --engine-ca /nope", "--engine-ca /nope"),
    flags(
        "--engine openai --engine-url http://a --engine-image-formats png --engine-convert-to jpeg",
        *("--engine-convert-to jpeg", "--engine-image-formats"),
    ),
    flags("--engine vllm --engine-args=--api-key=x", "--engine-args", "--api-key"),
    flags("--engine vllm", "vLLM is not installed", "--engine-python"),
    flags("/nope", "MODEL /nope", "built-in models: shapes"),
    flags("--config /nope.toml", "--config /nope.toml", "No such file"),
    # The environment
    environ("AFFERENT_PROT", "1", "AFFERENT_PORT?"),
    environ("AFFERENT_PORT", "", "AFFERENT_PORT=", "a whole number"),
    environ("AFFERENT_EXPLAIN", "maybe", "AFFERENT_EXPLAIN=maybe", "true or false"),
    environ("AFFERENT_API_KEY", "short", "AFFERENT_API_KEY", "16 to 256"),
    environ("AFFERENT_TENANTS", "acme", "tables of the file"),
    # The file
    toml("port = ", "--config", "no TOML"),
    toml("prot = 1", "'prot'", "port?"),
    toml("port = '8000'\nport = 1", "no TOML"),
    toml("port = true", "port = True", "a whole number"),
    toml("log_level = 'loud'", "log_level = 'loud'", "debug, info, warning, error"),
    toml("arena_nbytes = '2TB'", "arena_nbytes = '2TB'", "write 2TiB"),
    toml("file_roots = '/tmp'\n[server]\nport = 1", "'server'"),
    toml(TENANT.replace(KEY, "short"), "tenant 'a'", "api_keys", "16 to 256"),
    toml(TENANT + TENANT.replace('"a"', '"b"'), "API key stands twice"),
    toml(TENANT + "limit = 3", "tenant 'a'", "limit"),
    toml(TENANT + "weight = 0", "tenant 'a'", "weight"),
    toml("port = 0\nui = 0\n" + TENANT, "--ui 0", "--ui-key"),
]


@pytest.fixture(scope="module", autouse=True)
def _quiet_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AFFERENT_")]:
            patch.delenv(name)
        yield


def _num_open() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line of ``config check`` and ``serve``, which start and leave nothing."""
    for _ in range(2):  # the first import may open descriptors that stay
        num_open = _num_open()
        line = _refused_once(arguments, capsys)
        if _num_open() <= num_open:
            return line
    raise AssertionError("descriptors are left open")


def _refused_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    global _started
    lines = []
    for command in (["config", "check"], ["serve"]):
        _started = []
        try:
            start_s = time.process_time()
            status = cli.main([*command, *arguments])
            took_s = time.process_time() - start_s
            started = _started
        finally:
            _started = None
        said = capsys.readouterr()
        assert (status, said.out, started) == (2, "", [])
        (line,) = said.err.splitlines()
        lines.append(line)
        assert took_s < LIMIT_S or took_s < LIMIT_S * slowness()
    assert lines[0] == lines[1]
    return lines[0]


def arguments_of(wrong: Wrong, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    for name, value in wrong.environ.items():
        patch.setenv(name, value)
    chosen = [] if "--port" in wrong.flags else ["--port", "0"]
    if wrong.file or "AFFERENT_PORT" in wrong.environ:
        chosen = []
    if wrong.file:
        file = folder / "afferent.toml"
        file.write_text(wrong.file)
        chosen += ["--config", str(file)]
    return [*chosen, *wrong.flags.split()]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_settings(
    wrong: Wrong,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = refused(arguments_of(wrong, tmp_path, monkeypatch), capsys)
    for word in wrong.words:
        assert word in line


@pytest.mark.parametrize("name", FOLDERS)
def test_wrong_folders(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["--port", "0", str(make_folder(tmp_path, name))], capsys)
    for word in FOLDERS[name][1]:
        assert word in line


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        line = refused(["--port", port], capsys)
    assert f"--port {port}: can't listen on 127.0.0.1:{port}: Address already in use" in line


def test_there_are_many() -> None:
    assert len(WRONG) + len(FOLDERS) >= 90
    assert len({str(wrong) for wrong in WRONG}) == len(WRONG)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: ["--port", "x"],
        lambda _: ["--file-roots", "/nope"],
        lambda folder: [str(make_folder(folder, "nonsense"))],
    ],
    ids=["a value", "a folder for files", "a model"],
)
@pytest.mark.parametrize("command", [["config", "check"], ["serve"]], ids=" ".join)
def test_real_processes(
    command: list[str], make: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """The same in real processes."""
    whole = [sys.executable, "-m", "afferent.cli", *command, *make(tmp_path)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("error: ")
