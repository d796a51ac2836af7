"""Measure the mutation score of the store's logic: the share of generated faults that tests notice.

    python -m tools.mutation [--number 300] [--seed 1] [--only WORD] [--state FILE]

Cosmic Ray's operators make the faults: another comparison, a number off by one, a reversed
condition, a loop that does nothing. Places are drawn from a seed; at each place one of the possible
changes is made. Code that only checkers and tests use is left out (annotations, `validate`,
keyword-only markers), and so is `==` in place of `is`.

A fault is noticed by a unit test, or else by one of the first seeds of the simulator. Each is tried
in a fork of a process that has imported the libraries, but not this project: the fork imports it,
with the fault in it. `--state` saves the results, so that a later run can continue.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.abc
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing.pool import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "afferent"

TESTS: dict[str, tuple[str, ...]] = {
    "store/state": (
        *("allocator", "budget", "claims", "eviction", "fair_jobs", "jobs", "objects"),
        *("objects_machine", "permits", "reservations", "single_flight", "state"),
        *("state_machine", "tier_jobs", "declared"),
    ),
    "schedule": ("declared", "encoder_cache", "scheduler", "steps", "window"),
    "admission": (
        *("gate", "declared", "shares", "turns", "permits"),
        *("fair_jobs", "budget", "jobs", "state_machine"),
    ),
}
"""Folders and their tests; the test with the name of the file runs first."""
_TEST_FOLDERS = {
    "store/state": ("store", "quota"),
    "schedule": ("schedule", "quota"),
    "admission": ("admit", "quota", "store"),
}
_NOT_PRODUCT = {"store/state/rules.py"}
"""It has only `validate`."""
_ALIKE = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Operators that change nothing in comparisons of enums, `None` and small numbers."""
_MOST_MEMORY_NBYTES = 6 << 30
_FILE_LIMIT_S, _SEED_LIMIT_S = 60, 30
"""For one file of tests, which takes up to ten, and for one seed: more counts as a hang."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change: the ``occurrence``-th position of ``operator`` in ``file``."""

    file: str
    line: int
    operator: str
    occurrence: int

    def mutated(self) -> str:
        text = mutate_code((SOURCES / self.file).read_text(), _made(self.operator), self.occurrence)
        return str(text)

    def change(self) -> str:
        """Return the differing lines as one."""
        before = (SOURCES / self.file).read_text().splitlines()
        after = self.mutated().splitlines()
        different = [line for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
        return " ".join(line[:2] + line[2:].strip() for line in different)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def folder(self) -> str:
        return next(folder for folder in TESTS if self.file.startswith(folder))


# The generated faults


class _Nodes(Visitor):  # type: ignore[misc]
    """All nodes, in the order in which operators count them."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def visit(self, node: Any) -> Any:
        self.found.append(node)
        return node


def _made(name: str) -> Any:
    return get_operator(name)()


def _operators() -> list[str]:
    names = [name for name in operator_names() if not name.endswith(_ALIKE)]
    return sorted(name for name in names if not get_operator(name).arguments())


def _left_out(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes that only checkers and tests use."""
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(annotation=found):
                yield found
            case ast.arg(annotation=found) if found is not None:
                yield found
            case ast.FunctionDef(name="validate"):
                yield node
            case ast.FunctionDef(returns=found) | ast.AsyncFunctionDef(returns=found) if found:
                yield found
            case ast.Assign(value=ast.Subscript() as found):  # an alias of a type
                yield found
            case ast.ClassDef(bases=bases):
                yield from bases


def faults_of(path: Path) -> dict[tuple[int, int], list[Fault]]:
    """Return all faults of a file, by place."""
    text, file = path.read_text(), str(path.relative_to(SOURCES))
    out = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in _left_out(ast.parse(text))
    ]
    found: dict[tuple[int, int], list[Fault]] = defaultdict(list)
    nodes = _Nodes()
    nodes.walk(get_ast(text))
    for name in _operators():
        operator = _made(name)
        places = [place for node in nodes.found for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in out):
                found[start].append(Fault(file, start[0], name, occurrence))
    return found


def sample(number: int, seed: int) -> list[Fault]:
    """Draw faults, each at another place."""
    rng = random.Random(seed)  # noqa: S311 - reproducible by its seed
    found = {folder: sorted((SOURCES / folder).glob("*.py")) for folder in TESTS}
    if missing := [folder for folder, paths in found.items() if not paths]:
        raise SystemExit(f"there is no Python file in {', '.join(missing)}")
    paths = sorted(path for paths in found.values() for path in paths)
    places = [
        faults
        for path in paths
        if str(path.relative_to(SOURCES)) not in _NOT_PRODUCT
        for _, faults in sorted(faults_of(path).items())
    ]
    print(f"{sum(map(len, places))} faults at {len(places)} places", flush=True)
    rng.shuffle(places)
    chosen = (_one_that_compiles(rng, faults) for faults in places)
    return list(itertools.islice(filter(None, chosen), number))


def _one_that_compiles(rng: random.Random, faults: list[Fault]) -> Fault | None:
    """Return a fault that compiles and changes more than the names of arguments.

    Some changes are no valid Python. Others take the `*` in a signature for a product, which tests
    need not notice.
    """
    for fault in rng.sample(faults, len(faults)):
        with contextlib.suppress(SyntaxError):
            compile(fault.mutated(), fault.file, "exec")
            if _without_names(fault.mutated()) != _without_names(
                (SOURCES / fault.file).read_text()
            ):
                return fault
    return None


def _without_names(text: str) -> str:
    """Return the program without the distinction of positional and keyword arguments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults += [default for default in node.kw_defaults if default is not None]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
    return ast.dump(tree)


# The tests of a fault


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """A loader that imports one module with a fault in it."""

    def __init__(self, fault: Fault) -> None:
        module = "afferent." + fault.file.removesuffix(".py").replace("/", ".")
        self._name, self._text = module.removesuffix(".__init__"), fault.mutated()
        self._path = str(SOURCES / fault.file)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        is_package = self._path.endswith("__init__.py")
        spec = importlib.util.spec_from_loader(name, self, is_package=is_package)
        if spec is not None and is_package:
            spec.submodule_search_locations = [str(Path(self._path).parent)]
        return spec

    def get_source(self, name: str) -> str:
        return self._text

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, self._path, "exec"), module.__dict__)  # noqa: S102


def _test_files(fault: Fault) -> list[str]:
    found = [
        f"tests/{folder}/test_{name}.py"
        for name in TESTS[fault.folder]
        for folder in _TEST_FOLDERS[fault.folder]
    ]
    there = [file for file in found if (ROOT / file).exists()]
    stem = Path(fault.file).stem
    return sorted(there, key=lambda file: stem not in file)


class _FirstFailure:
    """A plugin of pytest that records the first failure."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid}, which can't be imported"


def _by_tests(files: Sequence[str]) -> str:
    import pytest

    first = _FirstFailure()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Hypothesis is imported already.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    for file in files:  # one by one: the first file notices most faults
        spent_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(spent_s) + _FILE_LIMIT_S, -1))
        code = pytest.main([*options, file], plugins=[first])
        if code != 0:
            return first.name or f"pytest, which ends with {code}"
    return ""


def _by_seeds(number: int) -> str:
    from tests.simulation.running import run_seed, stage

    with stage():
        for seed in range(number):
            signal.alarm(_SEED_LIMIT_S)
            if violation := run_seed(seed).violation:
                return f"seed {seed}: {violation}"
    return ""


def _apart(call: Callable[[], str], fault: Fault | None) -> str:
    """Run ``call`` in a fork with the fault; return its result.

    If the fork ends in another way, the fault is noticed: the result describes the end.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        said = ""
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_NBYTES, _MOST_MEMORY_NBYTES))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            if fault is not None:
                sys.meta_path.insert(0, _Mutated(fault))
            said = call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:200] or "an exception"
        finally:
            os.write(writing, said.encode()[:4000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"a hang ({signal.Signals(os.WTERMSIG(status)).name})"
    return said


def by_tests(fault: Fault) -> str:
    """Return the unit test that noticed the fault; empty if none did."""
    return _apart(lambda: _by_tests(_test_files(fault)), fault)


def by_seeds(fault: Fault, number: int) -> str:
    """Return the first seed that noticed the fault; empty if none did."""
    return _apart(lambda: _by_seeds(number), fault)


def _import_libraries() -> None:
    """Import the libraries for all forks, but no module of this project."""
    import asyncio
    import unittest.mock

    import blake3
    import greenlet
    import httpx2
    import hypothesis.stateful
    import hypothesis.strategies
    import ml_dtypes
    import msgspec
    import numpy
    import openai
    import PIL.ImageDraw
    import psutil
    import pytest
    import rich.progress
    import uvloop

    _ = asyncio, unittest, blake3, greenlet, httpx2, hypothesis, ml_dtypes, msgspec, numpy
    _ = openai, PIL, psutil, pytest, rich, uvloop


def main() -> int:
    """Return the exit status: 0 if the score is high enough."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--number", type=int, default=300, help="of faults (300)")
    parser.add_argument("--seed", type=int, default=1, help="by which they are drawn (1)")
    parser.add_argument("--seeds", type=int, default=2000, help="of the simulator (2000)")
    parser.add_argument("--only", default="", help="faults of files with this in their path")
    parser.add_argument("--least", type=float, default=0.95, help="score that is enough (0.95)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--state", type=Path, help="a file to write down what was found, and go on")
    args = parser.parse_args()
    notes = _Notes(args.state)
    drawn = notes.drawn(args.number, args.seed)
    faults = [fault for fault in drawn if args.only in fault.file]
    if not faults:
        parser.error(f"none of the faults is in a file with {args.only!r} in its path")
    os.chdir(ROOT)
    _import_libraries()
    if notes.are_new:
        _check_all_passes(faults)
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        tested = notes.fill(pool, "tests", by_tests, faults)
        left = [fault for fault, by in tested.items() if not by]
        seeded = notes.fill(pool, "seeds", partial(by_seeds, number=args.seeds), left)
    return _say(tested, seeded, args.least)


class _Notes:
    """The results of all faults, in a file if one is given, so that a later run can continue."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            self._known = json.loads(path.read_text())

    @property
    def are_new(self) -> bool:
        return not any(name.startswith("tests ") for name in self._known)

    def drawn(self, number: int, seed: int) -> list[Fault]:
        """Return the faults that `sample` draws, from the file if it has them."""
        name = f"sample {number} {seed}"
        if name not in self._known:
            self._known[name] = [asdict(fault) for fault in sample(number, seed)]
            self._save()
        return [Fault(**described) for described in self._known[name]]

    def _save(self) -> None:
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".part")  # for an atomic write
            beside.write_text(json.dumps(self._known, indent=1))
            beside.replace(self._path)

    def fill(
        self, pool: Pool, what: str, judge: Callable[[Fault], str], faults: Sequence[Fault]
    ) -> dict[Fault, str]:
        """Return the results of ``judge`` for all faults; run it for those without a result."""
        names = {fault: f"{what} {json.dumps(asdict(fault))}" for fault in faults}
        asked = [fault for fault in faults if names[fault] not in self._known]
        for number, (fault, by) in enumerate(
            zip(asked, pool.imap(judge, asked), strict=True), start=1
        ):
            self._known[names[fault]] = by
            self._save()
            said = f"{by:.150}" if by else f"NOT NOTICED BY {what.upper()}"
            print(
                f"{number:4}/{len(asked)} {fault.where}: {fault.change()}\n       {said}",
                flush=True,
            )
        return {fault: self._known[name] for fault, name in names.items()}


def _check_all_passes(faults: Sequence[Fault]) -> None:
    files = sorted({file for fault in faults for file in _test_files(fault)})
    if by := _apart(lambda: _by_tests(files), None) or _apart(lambda: _by_seeds(20), None):
        raise SystemExit(f"without any fault: {by}")


def _say(tested: dict[Fault, str], seeded: dict[Fault, str], least: float) -> int:
    made = Counter(fault.folder for fault in tested)
    by_tests = Counter(fault.folder for fault, by in tested.items() if by)
    by_seeds = Counter(fault.folder for fault, by in seeded.items() if by)
    for folder, number in made.items():
        print(
            f"{folder:12} {number:4} faults, {by_tests[folder]} noticed by tests, "
            f"{by_seeds[folder]} by seeds alone"
        )
    survivors = [fault for fault, by in seeded.items() if not by]
    for fault in sorted(survivors, key=lambda fault: (fault.file, fault.line)):
        print(f"  {fault.where}: {fault.change()}")
    score = 1 - len(survivors) / max(len(tested), 1)
    print(f"{score:.1%} of {len(tested)} are noticed")
    return int(score < least)


if __name__ == "__main__":
    sys.exit(main())
