"""Insert small faults, and check that the tests notice them.

    python -m tools.mutants [--only WORD] [--what WORD] [--list]

Each mutant is one change to one file of the package: a reversed condition, a constant that is off
by one, a missing limit. It is made in a copy. The tests run against that copy, and one of them has
to fail. A mutant that survives shows a missing test; the run then ends with 1.

A mutant whose text does not occur exactly once is an error, as is a test that can't run: a list
that does not fit the code proves nothing.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tools.mutant import Mutant
from tools.mutant_list import MUTANTS

ROOT = Path(__file__).parents[1]
_TIMEOUT_S = 300.0
_PASSED, _FAILED = 0, 1  # pytest's exit codes


class BadMutant(Exception):
    """A mutant of the list does not fit the code."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for a mutant; ``by`` is the failed test or a timeout; empty for a survivor."""

    by: str
    duration_s: float

    @property
    def is_caught(self) -> bool:
        return bool(self.by)


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the changed text of the mutant's file.

    Raises:
        BadMutant: The text to change does not occur exactly once.
    """
    text = (root / "src" / "afferent" / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise BadMutant(f"{mutant.file} has {mutant.old!r} {count} times")
    return text.replace(mutant.old, mutant.new)


def judge(mutant: Mutant, copy: Path) -> Verdict:
    """Run the mutant's tests against the sources in ``copy``.

    Raises:
        BadMutant: The tests can't run.
    """
    start_s = time.monotonic()
    with _applied(mutant, copy):
        by = _failing(copy, mutant.tests)
    return Verdict(by, time.monotonic() - start_s)


def _failing(copy: Path, tests: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # No byte code: it is matched with its source by time and size, which a mutant may share.
    env = {**os.environ, "PYTHONPATH": f"{copy}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "a time-out"
    if done.returncode not in (_PASSED, _FAILED):
        raise BadMutant(f"{' '.join(tests)} can't be run:\n{done.stdout[-2000:]}")
    if done.returncode == _PASSED:
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named.group(1) if named else "a test"


@contextmanager
def _applied(mutant: Mutant, copy: Path) -> Iterator[None]:
    path = copy / "afferent" / mutant.file
    before = path.read_text()
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    path.write_text(mutated(mutant))
    try:
        yield
    finally:
        path.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutants of files with this in their path")
    parser.add_argument("--list", action="store_true", help="check the list, and run nothing")
    parser.add_argument("--what", default="", help="mutants with this in their description")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.file and args.what in mutant.what]
    if not chosen:
        parser.error("no mutant has these words in its file and its description")
    for mutant in chosen:
        mutated(mutant)
    if args.list:
        print(f"{len(chosen)} mutants fit the code")
        return
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(copy, quiet=1)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        if by := _failing(copy, tests):
            raise SystemExit(f"without any mutant {by} fails")
        for mutant in chosen:
            verdict = judge(mutant, copy)
            survivors += not verdict.is_caught
            said = f"caught by {verdict.by}" if verdict.is_caught else "SURVIVES"
            print(f"{verdict.duration_s:5.1f} s  {mutant.file}: {mutant.what}: {said}", flush=True)
    if survivors:
        raise SystemExit(f"{survivors} of {len(chosen)} mutants survive")


if __name__ == "__main__":
    main()
