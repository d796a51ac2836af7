"""Check that a vLLM has the parts that Afferent uses.

    python -m afferent.engines.vllm.plugin.probe                the vLLM of this environment
    python -m afferent.engines.vllm.plugin.probe NEW [OLD]      a wheel or a folder of packages

The second form imports nothing of vLLM and needs no GPU. With ``OLD``, it also reports the parts
whose arguments or code differ between the two, with the difference. Its exit status is 1 if a part
is missing.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from afferent.engines.vllm.plugin.hooks import (
    HOOKS,
    OF_ARRIVALS,
    OF_MISTRAL,
    OF_NAMES,
    OF_SPEECH,
    SUPPORTED,
    Hook,
)
from afferent.engines.vllm.plugin.sources import Part, Sources
from afferent.errors import ConfigError

ANY_VERSION: Final = "AFFERENT_ANY_VLLM"
"""Environment variable: 1 tries a version of vLLM that Afferent was not tested with."""


def installed(hook: Hook) -> Part | None:
    """Return a part of the vLLM of this environment; ``None`` if it is missing."""
    try:
        found = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    # Not of a part without arguments, which may be a value.
    arguments = inspect.signature(found).parameters if hook.arguments else ()  # type: ignore[arg-type]
    return Part(hook.module, tuple(arguments), "", takes_any=False)


def missing(
    hooks: Sequence[Hook] = HOOKS, find: Callable[[Hook], Part | None] = installed
) -> list[str]:
    """Return the parts that a vLLM lacks, in words.

    Args:
        find: Returns a part of this vLLM: `installed`, or `Sources.find`.
    """
    lacks = []
    for hook in hooks:
        part = find(hook)
        if part is None:
            lacks.append(str(hook))
        elif unknown := _unknown(hook, part):
            lacks.append(f"{hook}({', '.join(unknown)})")
    return lacks


def has_stable_names() -> bool:
    """Whether this vLLM has the parts that names by content alone need."""
    return not missing(OF_NAMES)


def tells_of_arrivals() -> bool:
    """Whether the plugin can learn of a request before the scheduler does; imports the core."""
    return not missing(OF_ARRIVALS)


def check() -> None:
    """Check that Afferent works with this vLLM.

    Raises:
        RuntimeError: Afferent does not support this version of vLLM, or it lacks a part, or is set
            to use its Rust frontend.
    """
    import vllm

    if os.environ.get(ANY_VERSION, "0") in ("", "0") and not is_supported(vllm.__version__):
        raise RuntimeError(
            f"Afferent supports vLLM {', '.join(SUPPORTED)}, and this is {vllm.__version__}: "
            f"install one of these versions, or try this one with {ANY_VERSION}=1"
        )
    if lacks := missing():
        raise RuntimeError(f"Afferent can't work with this vLLM, which lacks {'; '.join(lacks)}")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise RuntimeError("Afferent needs vLLM's own frontend: unset VLLM_USE_RUST_FRONTEND")


def is_supported(version: str) -> bool:
    """Whether the tests have run with this version's minor version."""
    return ".".join(version.split(".")[:2]) in SUPPORTED


# Of a vLLM that is not imported


def report(new: Sources, old: Sources | None = None) -> Iterator[str]:
    """Yield the lines of a report about the parts of a vLLM, compared with an older one."""
    states: Counter[str] = Counter()
    for hook in (*HOOKS, *OF_NAMES, *OF_ARRIVALS, *OF_SPEECH, *OF_MISTRAL):
        part = new.find(hook)
        if part is None or _unknown(hook, part):
            state, lines = "missing", [f"needed: {', '.join(hook.arguments)}"]
        elif old is None:
            state, lines = "there", []
        else:
            state, lines = _change(part, old.find(hook))
        states[state] += 1
        if state not in _GOOD:
            yield f"{state:<18}{hook}{' (private)' if hook.is_private else ''}"
            yield from (f"    {line}" for line in lines)
    yield ", ".join(f"{number} {state}" for state, number in states.items())
    yield _verdict(new, is_same=states.keys() <= _GOOD)


_GOOD = frozenset({"there", "as before"})


def _verdict(new: Sources, *, is_same: bool) -> str:
    if missing(HOOKS, new.find):
        return "Afferent can't work with this vLLM"
    if missing(OF_NAMES, new.find):
        return "the names of items would contain their block, as this vLLM lacks what others need"
    if missing(OF_ARRIVALS, new.find):
        return "requests with new items would often begin a step later"
    if missing(OF_SPEECH, new.find):
        return "models that transcribe would not start"
    if missing(OF_MISTRAL, new.find):
        return "media for models in Mistral's own format would fail"
    if is_same:
        return "this vLLM has all parts that Afferent needs"
    return (
        "this vLLM has all parts that Afferent needs; read the changes, then run the tests with it"
    )


def _unknown(hook: Hook, part: Part) -> list[str]:
    """Return the arguments that a part does not take."""
    if part.takes_any:
        return []
    return [name for name in hook.arguments if name not in part.arguments]


def _change(new: Part, old: Part | None) -> tuple[str, list[str]]:
    """Return how a part has changed, and lines about the change."""
    if old is None:
        return "new", []
    if new == old:
        return "as before", []
    if (new.arguments, new.takes_any) != (old.arguments, old.takes_any):
        lines = [f"before: {', '.join(old.arguments)}", f"now: {', '.join(new.arguments)}"]
        return "other arguments", lines
    if new.code == old.code:
        return "moved", [f"before: {old.module}", f"now: {new.module}"]
    diff = difflib.unified_diff(old.code.splitlines(), new.code.splitlines(), lineterm="", n=1)
    return "other code", [line for line in diff if not line.startswith(("---", "+++"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("new", nargs="?", type=Path, metavar="NEW", help="wheel, or site-packages")
    parser.add_argument("old", nargs="?", type=Path, metavar="OLD", help="what to compare it with")
    args = parser.parse_args()
    if args.new is None:
        lacks = missing()
        print("\n".join(lacks) or "this vLLM has all parts that Afferent needs")
        sys.exit(bool(lacks))
    try:
        new, old = Sources(args.new), args.old and Sources(args.old)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(report(new, old)))
    sys.exit(bool(missing(HOOKS, new.find)))


if __name__ == "__main__":
    main()
