"""Parts of vLLM that the plugin uses: each of its imports is in the table, and a vLLM that is not
imported is read as Python would import it."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import pytest

import afferent.engines.vllm
from afferent.engines.vllm.plugin import probe
from afferent.engines.vllm.plugin.hooks import ALL, SUPPORTED, Hook
from afferent.engines.vllm.plugin.sources import Sources
from afferent.errors import ConfigError
from tests.pages import DOCS

MODULES = {
    "vllm/__init__.py": "",
    "vllm/parts/__init__.py": """
from .made import *
from .made import Base as Renamed
REGISTRY = Renamed()
""",
    "vllm/parts/made.py": """
import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

if True:
    from vllm.other import far

class Base(Generic[T]):
    def __init__(self, config=1, *, role=2):
        \"\"\"Say something.\"\"\"
        self.models: dict = {}

    @property
    def _private(self): ...

    def run(self, url, /, *rest, timeout=3, **more):
        \"\"\"Say something else.\"\"\"
        # and a comment
        return url

class Derived(Base):
    LIMIT = 3

@dataclass
class Fields:
    first: int
    second: str = ""

class MoreFields(Fields):
    third: int = 3
""",
    "vllm/other.py": """
try:
    import fast
except ImportError:
    async def far(x): return x
""",
}


def write(folder: Path, modules: dict[str, str]) -> Path:
    for name, text in modules.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def in_wheel(path: Path, modules: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in modules.items():
            wheel.writestr(name, text)
    return path


def test_each_import_of_the_plugin_is_in_the_table() -> None:
    known = {f"{hook.module}.{hook.name}" for hook in ALL} | {hook.module for hook in ALL}
    (folder,) = afferent.engines.vllm.__path__
    imported = set()
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert imported
    used_as_prefix = {".".join(name.split(".")[:-1]) for name in known}
    assert imported <= known | used_as_prefix


@pytest.mark.parametrize("is_wheel", [False, True], ids=["folder", "wheel"])
def test_parts_are_found_as_python_finds_them(tmp_path: Path, is_wheel: bool) -> None:
    make = in_wheel if is_wheel else write
    sources = Sources(make(tmp_path / "vllm.whl", MODULES))

    def arguments(name: str, module: str = "vllm.parts") -> tuple[str, ...] | None:
        part = sources.find(Hook(module, name))
        return part and part.arguments

    assert arguments("Renamed") == ("config", "role")
    assert arguments("Derived") == ("config", "role")
    assert arguments("Derived.run") == ("url", "timeout")
    assert arguments("Derived._private") == ()
    assert arguments("Derived.LIMIT") == ()
    assert arguments("REGISTRY.models") == ()
    assert arguments("REGISTRY.run") == ("url", "timeout")
    assert arguments("MoreFields") == ("first", "second", "third")
    assert arguments("far", "vllm.parts.made") == ("x",)
    for name in ("Nothing", "Derived.nothing", "far.nothing", "REGISTRY.models.nothing"):
        assert arguments(name) is None
    assert arguments("far", "vllm.nowhere") is None
    assert sources.find(Hook("vllm.parts", "far")) == sources.find(Hook("vllm.other", "far"))


def test_python_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of an imported vLLM and that of source code miss the same parts."""
    sources = Sources(write(tmp_path, MODULES))
    monkeypatch.syspath_prepend(tmp_path)
    hooks = [
        Hook("vllm.parts", "Derived", ("config",)),
        Hook("vllm.parts", "Derived", ("other",)),
        Hook("vllm.parts", "Derived.run", ("timeout",)),
        Hook("vllm.parts", "REGISTRY.run", ("timeout", "url")),
        Hook("vllm.parts", "far", ("y",)),
        Hook("vllm.parts", "Nothing"),
        Hook("vllm.parts.nowhere", "far"),
    ]
    try:
        assert probe.missing(hooks) == probe.missing(hooks, sources.find) != []
    finally:
        for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
            del sys.modules[name]


def test_report_names_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MODULES["vllm/parts/made.py"]
    old = Sources(write(tmp_path / "old", MODULES))
    changed = {
        **MODULES,
        "vllm/parts/__init__.py": MODULES["vllm/parts/__init__.py"].replace(
            "from .made import *", "from vllm.here import far\nfrom .made import *"
        ),
        "vllm/here.py": "async def far(x): return x",
        "vllm/parts/made.py": made.replace("return url", "return str(url)")
        .replace("first: int", "zeroth: int\n    first: int")
        .replace("LIMIT = 3", "pass")
        .replace("Say something", "Say nothing"),
    }
    new = Sources(write(tmp_path / "new", changed))
    monkeypatch.setattr(
        probe,
        "HOOKS",
        [
            Hook("vllm.parts", "Base", ("role",)),
            Hook("vllm.parts", "Base.run"),
            Hook("vllm.parts", "Base._private"),
            Hook("vllm.parts", "Fields", ("first",)),
            Hook("vllm.parts", "far"),
        ],
    )
    monkeypatch.setattr(probe, "OF_NAMES", [Hook("vllm.parts", "Derived.LIMIT")])
    monkeypatch.setattr(probe, "OF_ARRIVALS", [])
    monkeypatch.setattr(probe, "OF_SPEECH", [])
    monkeypatch.setattr(probe, "OF_MISTRAL", [])
    text = "\n".join(probe.report(new, old))
    assert "moved             vllm.parts.far\n    before: vllm.other\n" in text
    assert "other code        vllm.parts.Base.run\n" in text
    assert "    -return url\n    +return str(url)\n" in text
    assert "other arguments   vllm.parts.Fields\n    before: first, second\n" in text
    assert "    now: zeroth, first, second\n" in text
    assert "missing           vllm.parts.Derived.LIMIT\n" in text
    assert "Base._private" not in text
    assert "2 as before, 1 other code, 1 other arguments, 1 moved, 1 missing" in text
    assert text.endswith("as this vLLM lacks what others need")
    monkeypatch.setattr(probe, "OF_NAMES", [])
    has_all = "this vLLM has all parts that Afferent needs"
    assert list(probe.report(old, old)) == ["5 as before", has_all]
    assert list(probe.report(new)) == ["5 there", has_all]
    monkeypatch.setattr(probe, "OF_ARRIVALS", [Hook("vllm.parts", "Base.arrive")])
    assert list(probe.report(new))[-1] == "requests with new items would often begin a step later"
    monkeypatch.setattr(probe, "OF_ARRIVALS", [])
    monkeypatch.setattr(probe, "OF_SPEECH", [Hook("vllm.parts", "Base.hear")])
    assert list(probe.report(new))[-1] == "models that transcribe would not start"
    monkeypatch.setattr(probe, "OF_SPEECH", [])
    monkeypatch.setattr(probe, "OF_MISTRAL", [Hook("vllm.parts", "Base.write")])
    last = "media for models in Mistral's own format would fail"
    assert list(probe.report(new))[-1] == last
    monkeypatch.setattr(probe, "OF_MISTRAL", [])
    monkeypatch.setattr(probe, "HOOKS", [Hook("vllm.parts", "Fields", ("colour",))])
    assert list(probe.report(new)) == [
        "missing           vllm.parts.Fields",
        "    needed: colour",
        "1 missing",
        "Afferent can't work with this vLLM",
    ]


def test_what_is_no_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no package vllm"):
        Sources(tmp_path)
    with pytest.raises(ConfigError, match="has no package vllm"):
        Sources(in_wheel(tmp_path / "other.whl", {"other/__init__.py": ""}))
    (tmp_path / "torn.whl").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="is no wheel"):
        Sources(tmp_path / "torn.whl")


def test_supported_versions() -> None:
    assert all(probe.is_supported(f"{version}.7+cpu") for version in SUPPORTED)
    for version in ("0.30.0", "0.34.0rc1", "1.33.0", "dev", "0.3"):
        assert not probe.is_supported(version)


def test_each_private_part_is_in_a_text_for_vllms_tracker() -> None:
    page = (DOCS / "vllm-wishes.md").read_text(encoding="utf-8")
    private = {
        part
        for hook in ALL
        for part in hook.name.split(".")
        if part.startswith("_") and not part.startswith("__")
    }
    assert len(private) >= 9
    assert {
        part for part in private if f"`{part}`" not in page and f".{part}`" not in page
    } == set()
