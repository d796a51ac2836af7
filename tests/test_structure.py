"""The structure of the packages: no circular imports, and no file that is too short."""

from __future__ import annotations

from pathlib import Path

from tools import arrows

ROOT = Path(__file__).parent.parent / "src" / "afferent"


def test_nobody_imports_in_a_circle() -> None:
    found = arrows.survey(ROOT)
    assert found["circles"] == []
    assert [name for name, each in found["packages"].items() if each["circles"]] == []


def test_no_file_is_too_short_to_be_one() -> None:
    """A short file that only one module imports belongs into that module."""
    assert arrows.survey(ROOT)["short"] == []


def test_arrows_are_counted_once_and_by_room(tmp_path: Path) -> None:
    root = tmp_path / "house"
    files = {
        "__init__.py": "",
        "hall.py": "from house.kitchen import stove\nfrom house.kitchen.stove import heat\n",
        "kitchen/__init__.py": "",
        "kitchen/stove.py": "from typing import TYPE_CHECKING\nfrom house.kitchen import pot\n"
        "if TYPE_CHECKING:\n    from house import hall\n",
        "kitchen/pot.py": "def boil():\n    from house.cellar import wood\n",
        "cellar/__init__.py": "",
        "cellar/wood.py": "import house.hall\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = arrows.survey(root)
    assert found["packages"]["house"] == {
        "files": 4,
        "rooms": 2,
        "arrows": 4,
        "within": 1,
        "between": 3,
        "pairs": 3,
        "circles": 1,
    }
    assert found["circles"] == [
        ["house.cellar.wood", "house.hall", "house.kitchen.pot", "house.kitchen.stove"]
    ]
    names = {(name, importer) for name, _, importer in found["short"]}
    assert ("house.kitchen.pot", "house.kitchen.stove") in names
