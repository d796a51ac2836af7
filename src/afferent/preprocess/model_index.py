"""`transformers`' index of its models, kept from the last start.

When it is imported, `transformers` reads the sources of all its models, thousands of files, to know
which names there are. That changes with an installation alone, so what came of it is kept in the
user's cache, and read from there by the next process. Whatever is wrong with it, `transformers`
does what it would do anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

_MODULE: Final = "transformers.utils.import_utils"
_FUNCTION: Final = "define_import_structure"

Index = dict[frozenset[str], dict[str, set[str]]]
"""By what a module needs to be there: the names that it has."""

_decoder: Final = msgspec.json.Decoder(list[tuple[list[str], dict[str, set[str]]]])


def keep_index() -> None:
    """Have `transformers` take its index from the cache; to be called before it is imported."""
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that makes the index, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if callable(define := getattr(module, _FUNCTION, None)):
            setattr(module, _FUNCTION, _kept(define))


def _kept(define: Callable[..., Index]) -> Callable[..., Index]:
    """Of all models at once; the index of one is small, and read as ever."""
    found: Index | None = None

    def define_kept(module_path: str | Path, prefix: str | None = None) -> Index:
        nonlocal found
        folder = Path(module_path)
        folder = folder.parent if folder.suffix == ".py" else folder
        if folder.name != "models" or folder.parent.name != "transformers":
            return define(module_path, prefix)
        if found is None:
            place = _place(folder)
            found = _read(place)
            if found is None:
                found = define(str(folder))
                _write(place, found)
        start = "" if prefix is None else f"{prefix}."
        return {
            needed: {start + module: set(names) for module, names in modules.items()}
            for needed, modules in found.items()
        }

    return define_kept


def _place(folder: Path) -> Path:
    """Another for each installation, and for each change of it that adds or removes a model."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(given) if given.startswith("/") else Path("~/.cache").expanduser()
    stat = folder.stat()
    version = metadata.version("transformers")
    installed = f"{version} {folder} {stat.st_mtime:.0f} {sys.version_info[:2]}"
    digest = hashlib.sha256(installed.encode()).hexdigest()[:16]
    return cache / "afferent" / f"transformers-{digest}.json"


def _read(place: Path) -> Index | None:
    try:
        if place.stat().st_uid != os.getuid():
            return None
        return {
            frozenset(needed): modules for needed, modules in _decoder.decode(place.read_bytes())
        }
    except (OSError, msgspec.MsgspecError):
        return None


def _write(place: Path, index: Index) -> None:
    """All of it or nothing, whoever else writes it now."""
    rows: list[tuple[Any, ...]] = [(sorted(needed), modules) for needed, modules in index.items()]
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(msgspec.json.encode(rows))
        Path(file.name).replace(place)
