from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from msgspec import Struct

from afferent.runtime import process

MODULE = """
import json, os, sys
with open(os.environ["TOLD"], "w") as file:
    json.dump(dict(os.environ), file)
"""

LOADS = """
import gc, json, os
from afferent.runtime.process import ChildProcess
told = []
def tell():
    told.append([gc.isenabled(), gc.get_freeze_count() > 0])
child = ChildProcess.start()
tell()
child.report("loading")
tell()
child.report("all", ready=True)
tell()
with open(os.environ["TOLD"], "w") as file:
    json.dump(told, file)
"""


def test_nothing_is_collected_before_a_child_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loads.py").write_text(LOADS)
    told = tmp_path / "told.json"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("TOLD", str(told))
    log = process.LogSettings(level="warning", format="text")
    child = process.spawn("loads", "loads", Struct(), log=log)
    try:
        assert child.popen.wait(60) == 0
    finally:
        child.close()
    is_enabled, has_frozen = zip(*json.loads(told.read_text()), strict=True)
    assert is_enabled == (False, False, True)
    assert has_frozen == (False, False, True)


def test_a_child_does_not_inherit_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the settings is an API key."""
    (tmp_path / "tells.py").write_text(MODULE)
    told = tmp_path / "told.json"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setenv("AFFERENT_API_KEY", "acme-key-0123456789")
    log = process.LogSettings(level="warning", format="text")
    child = process.spawn("tells", "tells", Struct(), log=log, env={"MORE": "1"})
    try:
        assert child.popen.wait(60) == 0
    finally:
        child.close()
    inherited = json.loads(told.read_text())
    assert not [name for name in inherited if name.startswith("AFFERENT_")]
    assert (inherited["MORE"], inherited["PATH"]) == ("1", os.environ["PATH"])


def test_what_can_not_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    before = psutil.Process().num_fds()
    log = process.LogSettings(level="warning", format="text")
    for where, call in ((os, "memfd_create"), (subprocess, "Popen")):
        with monkeypatch.context() as patched:
            patched.setattr(where, call, fail)
            with pytest.raises(OSError, match="no memory"):
                process.spawn("x", "afferent.errors", Struct(), log=log)
    assert psutil.Process().num_fds() == before
