"""What `transformers` would find out about its models, kept: the same, and made anew where it may
not be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from afferent.preprocess import model_index
from afferent.preprocess.model_index import Index

NAMES: Index = {
    frozenset(): {"one.configuration_one": {"OneConfig", "TwoConfig"}},
    frozenset({"torch", "vision"}): {"one.modeling_one": {"OneModel"}},
}


class Definer:
    """Counts how often it had to find out."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, module_path: str | Path, prefix: str | None = None) -> Index:
        self.num_calls += 1
        return NAMES

    @property
    def kept(self) -> Callable[..., Index]:
        """As of a new process."""
        return model_index._kept(self)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "transformers" / "models"
    folder.mkdir(parents=True)
    return folder


def test_it_is_found_out_once(models: Path) -> None:
    define = Definer()
    kept = define.kept
    assert kept(models, prefix="models") == {
        needed: {f"models.{name}": found for name, found in modules.items()}
        for needed, modules in NAMES.items()
    }
    assert kept(str(models / "__init__.py")) == NAMES
    assert define.kept(models) == NAMES
    assert define.num_calls == 1


def test_of_one_model_it_is_read_as_ever(models: Path) -> None:
    define = Definer()
    for _ in range(2):
        define.kept(str(models / "one" / "__init__.py"))
    assert define.num_calls == 2


def test_a_change_of_the_installation_is_seen(models: Path) -> None:
    define = Definer()
    define.kept(models)
    (models / "two").mkdir()
    os.utime(models, (1, 1))
    define.kept(models)
    assert define.num_calls == 2


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b'[[["torch"], {"a": 3}]]'])
def test_what_is_broken_is_made_anew(models: Path, tmp_path: Path, content: bytes) -> None:
    define = Definer()
    define.kept(models)
    (place,) = (tmp_path / "cache" / "afferent").iterdir()
    place.write_bytes(content)
    assert define.kept(models) == NAMES
    assert define.num_calls == 2
    define.kept(models)
    assert define.num_calls == 2


def test_without_a_place_to_keep_it_all_is_as_it_was(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    define = Definer()
    assert define.kept(models) == define.kept(models) == NAMES
    assert define.num_calls == 2


_COMPARE = """
import sys
from afferent.preprocess.model_index import keep_index
if sys.argv[1] == "kept":
    keep_index()
import transformers
from transformers import AutoConfig, models
print(hash(tuple(sorted(transformers.__all__))), hash(tuple(sorted(models.__all__))))
print(AutoConfig.for_model("qwen2_vl").model_type)
"""


def test_transformers_has_the_same_names(tmp_path: Path) -> None:
    """Without it, with it for the first time, and from what was kept."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "0"}
    said = []
    for how in ("plain", "kept", "kept"):
        command = [sys.executable, "-c", _COMPARE, how]
        said.append(subprocess.check_output(command, env=env, timeout=120))
        assert len(list(tmp_path.glob("afferent/*.json"))) == (how == "kept")
    assert said[0] == said[1] == said[2]
    assert said[0].endswith(b"qwen2_vl\n")
