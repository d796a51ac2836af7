"""``afferent doctor``: what is wrong, and how to fix it."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afferent import cli
from afferent.operations.commands import doctor, machine
from tests.wrong_folders import make_folder

SMALL = ["--port", "0", "--arena-nbytes", "64MiB"]


def examine(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and the findings by the subject of each check."""
    status = cli.main(["doctor", "--json", *SMALL, *arguments])
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert status == any(one["level"] == "wrong" for one in found.values())
    return status, found


def test_here_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine(capsys=capsys)
    assert status == 0, [each for each in found.values() if each["level"] == "wrong"]
    looked_at = ["settings", "keys", "kernel", "confinement", "system calls", "packages"]
    looked_at += [
        "resizing",
        "open files",
        "cores",
        "memory",
        "overcommit",
        "huge pages",
        "sockets",
    ]
    assert list(found)[: len(looked_at)] == looked_at
    assert list(found)[-4:] == ["port", "model", "engine", "start"]
    assert cli.main(["doctor", *SMALL]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")


def test_tier_that_can_not_be_reached_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"redis://user:secret@127.0.0.1:{closed.getsockname()[1]}"
    status, found = examine("--tier", url, capsys=capsys)
    assert (status, found["tier"]["level"]) == (0, "could be better")
    assert "can't be reached, and a server goes on without it" in found["tier"]["found"]
    assert cli.main(["config", "check", *SMALL, "--tier", url]) == 0
    shown = capsys.readouterr().out
    assert f"warning: the tier redis://{url.rpartition('@')[2]} can't be reached" in shown
    assert cli.main(["config", "check", "--json", *SMALL, "--tier", url]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "can't be reached" in warning
    assert "secret" not in shown + warning


def test_tier_that_answers_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine("--tier", f"file://{tmp_path}/tier", capsys=capsys)
    assert (status, found["tier"]["level"]) == (0, "ok")
    assert "answers" in found["tier"]["found"]
    assert cli.main(["config", "check", "--json", *SMALL, "--tier", f"file://{tmp_path}/tier"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_all_that_is_wrong_is_found_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "no weights")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        status, found = examine("--port", port, str(folder), capsys=capsys)
        assert status == 1
        assert "Address already in use" in found["port"]["found"]
        assert "--port" in found["port"]["mend"]
        assert "has no weights" in found["engine"]["found"]
        assert cli.main(["doctor", *SMALL, "--port", port, str(folder)]) == 1
    assert "  -> --port with another" in capsys.readouterr().out


def test_wrong_settings_are_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine("--log-level", "loud", capsys=capsys)
    assert status == 1
    assert "--log-level loud" in found["settings"]["found"]
    assert "kernel" in found


def test_keys_that_others_read_and_servers_that_ask_for_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text('[[tenants]]\nname = "a"\napi_keys = ["aaaaaaaaaaaaaaaaaaaa"]\n')
    for mode, level in ((0o644, "could be better"), (0o640, "ok"), (0o600, "ok")):
        file.chmod(mode)
        _, found = examine("--config", str(file), "--host", "0.0.0.0", capsys=capsys)
        assert (found["file"]["level"], found["keys"]["level"]) == (level, "ok")
    _, found = examine("--host", "0.0.0.0", capsys=capsys)
    assert "AFFERENT_API_KEY" in found["keys"]["mend"]


@pytest.mark.parametrize("line", ["fleet_secret", "item_events_key", "ui_key"])
def test_any_secret_that_others_read_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    file = tmp_path / "afferent.toml"
    file.write_text(f'{line} = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"\n')
    file.chmod(0o644)
    _, found = examine("--config", str(file), capsys=capsys)
    assert found["file"]["level"] == "could be better"


def test_shared_memory_is_needed_by_a_vllm_that_is_started_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed: list[bool] = []

    def findings(*, needs_shm: bool, **_: object) -> list[machine.Finding]:
        needed.append(needs_shm)
        return []

    monkeypatch.setattr(doctor, "findings", findings)
    for engine in (["--engine-url", "http://127.0.0.1:1"], []):
        cli.main(["doctor", "--json", *SMALL, "--engine", "vllm", *engine])
    assert needed == [False, True]


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_limits(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = examine("--preprocess-workers", "1000", capsys=capsys)
    assert found["open files"]["level"] == "could be better"
    assert "ulimit -n" in found["open files"]["mend"]
    assert "--preprocess-workers" in found["cores"]["mend"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["no-such-package>=1"], "no-such-package is missing"),
        (["msgspec>=99; extra == 'engine'"], "not >=99"),
    ],
)
def test_versions(lines: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.metadata, "requires", lambda _: lines)
    found = {
        one.what: one for one in machine.findings(num_workers=1, extras=["engine"], needs_shm=True)
    }
    assert words in found["packages"].found
    assert "-m pip install --upgrade '.[engine]' in the clone of Afferent" in found["packages"].mend
    assert found["/dev/shm"].level in ("ok", "wrong")
