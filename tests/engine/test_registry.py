"""Engines by their names, and the error messages for wrong names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afferent import cli
from afferent.builtin.engine.kind import ReferenceEngine
from afferent.config import Settings
from afferent.engines import registry
from afferent.engines.contract import EnginePlan, EngineSite
from afferent.engines.remote.kind import RemoteKind, RemoteLink
from afferent.errors import ConfigError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class Nameless(RemoteKind[Any]):
    summary = "tells nobody what it is called"

    def reserved_nbytes(self, model_folder: Path, settings: Settings) -> int:
        return 0

    def plan(self, site: EngineSite, settings: Settings) -> EnginePlan[RemoteLink]:
        raise NotImplementedError


class Odd(ReferenceEngine):
    settings_type = dict  # type: ignore[assignment]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package that offers an engine, as pip would."""
    about = tmp_path / "pocket_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pocket-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[{registry.GROUP}]\npocket = pocket_engine:Pocket\nbroken = pocket_engine:Nothing\n"
    )
    (tmp_path / "pocket_engine.py").write_text(
        "from afferent.builtin.engine.kind import ReferenceEngine\n"
        "class Pocket(ReferenceEngine):\n"
        "    name = 'pocket'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("pocket_engine", None)


def test_the_built_in_engine_is_declared_as_others_are() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["entry-points"][registry.GROUP] == registry.BUILT_IN
    assert type(registry.find("reference")) is ReferenceEngine


def test_by_module_and_factory() -> None:
    assert type(registry.find(registry.BUILT_IN["reference"])) is ReferenceEngine


@pytest.mark.usefixtures("installed")
def test_a_package_adds_an_engine() -> None:
    assert registry.find("pocket").name == "pocket"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", ["--engine nonsense", "broken, openai, pocket, reference", "MODULE:FACTORY"]),
        ("", ["--engine ''", "reference"]),
        ("broken", ["--engine broken", "pocket_engine:Nothing", "AttributeError"]),
        ("no_such_module:engine", ["no_such_module:engine", "ModuleNotFoundError"]),
        ("afferent.types:nothing", ["afferent.types:nothing", "AttributeError"]),
        ("afferent.types:", ["afferent.types:"]),
        (":engine", [":engine"]),
        ("afferent.types:GiB", ["afferent.types:GiB", "not callable"]),
        ("builtins:dict", ["builtins:dict", "gives a dict, which is no EngineKind"]),
        ("afferent.engines.contract:EngineKind", ["abstract", "connect"]),
        (f"{__name__}:Nameless", ["lacks name, a text", "settings_type, a subclass of Settings"]),
        (f"{__name__}:Odd", ["lacks settings_type, a subclass of Settings"]),
    ],
)
def test_what_is_no_engine_is_one_line(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.find(name)
    for word in words:
        assert word in caught.value.message
    assert "\n" not in caught.value.message
    assert cli.main(["serve", "--engine", name]) == 2
    assert capsys.readouterr().err == f"error: {caught.value.message}\n"


def test_what_describes_an_engine_needs_no_torch() -> None:
    """Every frontend imports it."""
    program = (
        "import sys\n"
        "from afferent.engines import registry\n"
        "registry.find('reference')\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
