"""Packages whose names are imported on first use.

Each process of a server imports packages of which it needs only a few names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def face(
    namespace: dict[str, Any], homes: Mapping[str, str], modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], Sequence[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        namespace: The package's ``globals()``, with its ``__all__``.
        homes: For each module, its names, separated by blanks.
        modules: For each name of a module, the module itself.
    """
    package = namespace["__name__"]
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> object:
        if name in modules:
            found: object = importlib.import_module(modules[name])
        elif name in home_of:
            found = getattr(importlib.import_module(home_of[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = found
        return found

    return find, lambda: sorted({*namespace, *namespace["__all__"]})
