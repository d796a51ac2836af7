"""Check the types of the documentation's Python programs, with mypy and pyright.

python -m tools.typed_examples

A block is checked as a file, or together with the other blocks of its page where they belong
together. Its lines have the numbers that they have in the page. Not checked are:

- fragments, except for those that only lack an argument or a server;
- programs that need packages that are not installed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.pages import PAGES, ROOT, Block, blocks_of, name_of

TOGETHER = {
    "docs/format.md": """
from afferent import codec
tree: dict[str, codec.Tree]
block: memoryview
""",
    "docs/scheduling.md": """
from collections.abc import Sequence
from typing import Protocol
import numpy as np
from afferent import Placeholder
from afferent.schedule import Chunk, EncoderCache, EncoderInput, Step, WindowIndex
class Workers(Protocol):
    def do(self, step: Step) -> Sequence[tuple[str, int]]: ...
index: WindowIndex[EncoderInput]
cache: EncoderCache
chunk: Chunk
placeholder: Placeholder
embeddings: dict[bytes, np.ndarray]
workers: Workers
end: int
key: bytes
request_id: str
EOS: int
""",
    "docs/store.md": """
from collections.abc import Callable
from typing import Any
import numpy as np
from afferent import ContentKey, Store
store: Store
core: Store
workers: list[Store]
pixels: np.ndarray
grid: np.ndarray
sizes: dict[ContentKey, int]
trees: dict[ContentKey, dict[str, np.ndarray]]
encode: Callable[[Any], np.ndarray]
digest_of_the_encoder: bytes
""",
    "docs/writing-an-engine.md": """
from collections.abc import AsyncGenerator as AsyncGenerator
from typing import Protocol as Protocol
from afferent import (
    EngineEvent as EngineEvent,
    EngineInfo as EngineInfo,
    EngineRequest as EngineRequest,
    EngineStats as EngineStats,
)
""",
}
"""Pages whose blocks belong together, with stubs of the names that the first block needs."""

COMPLETE = ("docs/clients.md", "docs/library.md")
"""Pages whose fragments are complete programs."""

ELSEWHERE = ("docs/ray.md", "docs/offline-vllm.md", "docs/rl.md")
"""Pages whose programs need packages of other environments; tests run them there."""

_LARGE = ("torch", "transformers")
"""Packages for whose modules mypy takes half a minute. It follows imports of them only if one of
the programs has such an import itself."""

_CHECKERS: Mapping[str, tuple[str, ...]] = {
    "mypy": ("--no-error-summary", "--hide-error-context", "--config-file"),
    "pyright": ("--pythonpath", sys.executable, "--project"),
}

_SKIPPED = "[mypy-{}.*]\nfollow_imports = skip\n"


@dataclass(frozen=True, slots=True)
class Program:
    """A program of a page; ``given`` is a stub of the names that it needs."""

    page: Path
    text: str
    given: str = ""


def programs(pages: Iterable[Path] = PAGES) -> dict[str, Program]:
    """Return the programs by the names of their files."""
    found: dict[str, Program] = {}
    for page in pages:
        name = name_of(page)
        blocks = [each for each in blocks_of(page, "python") if _is_program(each)]
        stem = name.removesuffix(".md").replace("/", "_").replace("-", "_")
        if name in TOGETHER and blocks:
            text = f"from {stem}_given import *{_placed(blocks)}"
            found[stem] = Program(page, text, TOGETHER[name])
        else:
            found |= {f"{stem}_{each.line}": Program(page, _placed([each])) for each in blocks}
    return found


def _is_program(block: Block) -> bool:
    if name_of(block.page) in ELSEWHERE and not _is_installed(block.text):
        return False
    return not block.is_fragment or (name_of(block.page) in COMPLETE and _is_installed(block.text))


def _is_installed(program: str) -> bool:
    """Return whether all packages that it imports are installed."""
    return all(map(importlib.util.find_spec, _packages_of(program)))


def _packages_of(program: str) -> set[str]:
    """Return the names of the packages that the program imports."""
    used = set[str]()
    for node in ast.walk(ast.parse(program)):
        match node:
            case ast.ImportFrom(module=str(module)):
                used.add(module)
            case ast.Import(names=names):
                used |= {alias.name for alias in names}
    return {each.partition(".")[0] for each in used}


def _placed(blocks: Iterable[Block]) -> str:
    """Return the blocks, each at its line of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def check(found: Mapping[str, Program]) -> str:
    """Return the errors of both checkers, with the page and its line; empty if there are none."""
    complaints: list[str] = []
    used = set[str]().union(*(_packages_of(each.text + each.given) for each in found.values()))
    skipped = [package for package in _LARGE if package not in used]
    cache = ROOT / ".mypy_cache" / "-".join(["examples", *(f"no-{each}" for each in skipped)])
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        for stem, program in found.items():
            file = Path(folder) / f"{stem}.py"
            file.write_text(program.text)
            files[str(file)] = program.page
            if program.given:
                (Path(folder) / f"{stem}_given.pyi").write_text(program.given)
        (Path(folder) / "pyrightconfig.json").write_text(json.dumps({"include": ["."]}))
        config = Path(folder) / "mypy.ini"
        config.write_text(f"[mypy]\ncache_dir = {cache}\n" + "".join(map(_SKIPPED.format, skipped)))
        for checker, options in _CHECKERS.items():
            last = [str(config), *files] if checker == "mypy" else [folder]
            done = subprocess.run(
                [str(Path(sys.executable).parent / checker), *options, *last],
                cwd=ROOT,
                env={**os.environ, "MYPYPATH": folder, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                complaints.append(_by_page(f"{checker}:\n{done.stdout}{done.stderr}", files))
    return "\n".join(complaints)


def _by_page(complaints: str, files: Mapping[str, Path]) -> str:
    for file, page in files.items():
        # mypy caches errors with the folder of the earlier run.
        complaints = re.sub(rf"[^\s:]*/{re.escape(Path(file).name)}", name_of(page), complaints)
    return complaints


def main() -> int:
    found = programs()
    if complaints := check(found):
        print(complaints, file=sys.stderr)
        return 1
    print(f"{len(found)} programs of the documentation have no wrong types")
    return 0


if __name__ == "__main__":
    sys.exit(main())
