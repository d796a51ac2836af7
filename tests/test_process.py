from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import Struct

from afferent import process

MODULE = """
import json, os, sys
with open(os.environ["TOLD"], "w") as file:
    json.dump(dict(os.environ), file)
"""


def test_a_child_does_not_inherit_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of the API is one of them."""
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
