"""Packages whose names come when they are asked for.

Each process of a server imports the packages that it takes anything from, and most need next to
nothing of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def face(
    namespace: dict[str, Any], homes: Mapping[str, str], modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], Sequence[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        namespace: The package's ``globals()``, with its ``__all__``.
        homes: Names, divided by blanks, for each module that has them.
        modules: The module that stands behind each name which is one.
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
