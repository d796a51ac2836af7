"""Changes to the plugin in processes of vLLM, for tests: Python runs this file at each start.

Each point waits while the file ``hold-POINT`` exists in the folder of ``TEST_HOLDS``, and
creates ``held-POINT``. While ``break-encoder`` exists there, the encoder raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("TEST_HOLDS", "/nonexistent"))
_PLUGIN = "afferent.engines.vllm.plugin"
POINTS = {
    f"{_PLUGIN}.step_pins": ("StepPins", "expect", "core"),
    f"{_PLUGIN}.step_reader": ("StepReader", "block", "worker"),
}


def held(call: Any, point: str) -> Any:
    """Return the method, which waits at its start as long as it is told to."""

    @functools.wraps(call)
    def wait_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if point == "worker":
            _break_encoder()
        if args[-1] and (FOLDER / f"hold-{point}").exists():
            (FOLDER / f"held-{point}").touch()
            while (FOLDER / f"hold-{point}").exists():
                time.sleep(0.005)
        return call(self, *args, **kwargs)

    return wait_and_call


def _break_encoder() -> None:
    encoder = importlib.import_module(f"{_PLUGIN}.models")._Encoder
    run = encoder._run
    if getattr(run, "is_breakable", False):
        return

    def may_break(self: Any, *args: Any) -> Any:
        if (FOLDER / "break-encoder").exists():
            raise RuntimeError("the encoder fails for a test")
        return run(self, *args)

    may_break.is_breakable = True  # type: ignore[attr-defined]
    encoder._run = may_break


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in POINTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run, (cls, method, point) = spec.loader.exec_module, POINTS[name]

        def exec_module(module: ModuleType) -> None:
            run(module)
            owner = getattr(module, cls)
            setattr(owner, method, held(getattr(owner, method), point))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if FOLDER.is_dir():
    sys.meta_path.insert(0, _Finder())
