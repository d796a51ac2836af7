"""The public API: the list of names, the attributes, the types and the documentation agree."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import afferent

ROOT = Path(__file__).parent.parent
FACES = (
    "afferent",
    "afferent.engines",
    "afferent.ray",
    "afferent.schedule",
    "afferent.vllm",
    "afferent.conformance",
)
TAUGHT_BY_EXAMPLE = [
    afferent,
    afferent.AsyncDaemonStore,
    afferent.AsyncFeatures,
    afferent.AsyncItemCache,
    afferent.DaemonStore,
    afferent.Features,
    afferent.Gate,
    afferent.ItemCache,
    afferent.LocalStore,
    afferent.Store,
    afferent.StoreServer,
    afferent.codec,
    afferent.keys,
    afferent.schedule.EncoderCache,
    afferent.schedule.Scheduler,
    afferent.schedule.WindowIndex,
]


def face(name: str) -> ModuleType:
    return importlib.import_module(name)


def typed_names(module: ModuleType) -> set[str]:
    """Return the names that type checkers see, including imports for type checkers only."""
    tree = ast.parse(inspect.getsource(module))
    names = {"__version__"} & set(vars(module))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(origin)) if origin.startswith("afferent"):
                names |= {alias.asname or alias.name for alias in node.names}
    return names - {"face"}


@pytest.mark.parametrize("name", FACES)
def test_the_list_is_sorted_and_all_of_it_is_there(name: str) -> None:
    module = face(name)
    assert module.__all__ == sorted(set(module.__all__))
    for each in module.__all__:
        assert getattr(module, each) is not None
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("name", FACES)
def test_types_know_what_is_listed(name: str) -> None:
    assert typed_names(face(name)) == set(face(name).__all__)


@pytest.mark.parametrize("name", FACES)
def test_what_is_not_listed_is_not_there(name: str) -> None:
    """A misspelt name is an error, even in modules with lazy imports."""
    with pytest.raises(AttributeError, match="no attribute 'Itemcache'"):
        _ = face(name).Itemcache


@pytest.mark.parametrize("name", FACES)
def test_the_reference_documents_what_is_listed(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    documented = set(re.findall(rf"^::: {re.escape(name)}\.(\w+)$", page, re.MULTILINE))
    listed = {each for each in face(name).__all__ if each != "__version__"}
    assert documented - listed <= {each for each in documented if f"{name}.{each}" in FACES}
    assert listed <= documented


@pytest.mark.parametrize("name", FACES)
def test_every_class_and_function_says_what_it_is(name: str) -> None:
    for each in face(name).__all__:
        found = getattr(face(name), each)
        if inspect.isclass(found) or inspect.isroutine(found) or inspect.ismodule(found):
            assert inspect.getdoc(found), each


@pytest.mark.parametrize("taught", TAUGHT_BY_EXAMPLE, ids=lambda each: each.__name__)
def test_help_teaches_by_an_example_that_runs(taught: type | ModuleType) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    home = taught if isinstance(taught, ModuleType) else sys.modules[taught.__module__]
    (found,) = finder.find(taught, taught.__name__, module=home, globs={})
    assert found.examples, f"help({taught.__name__}) has no example"
    assert doctest.DocTestRunner().run(found).failed == 0


@pytest.mark.parametrize(
    "described",
    [
        *(afferent.EngineRequest, afferent.Tokens, afferent.Finished, afferent.EngineInfo),
        *(afferent.EngineStats, afferent.Sampling, afferent.TokenLogprobs, afferent.Item),
        *(afferent.Handle, afferent.Placeholder, afferent.Span, afferent.Failure),
        *(afferent.TensorSpec, afferent.engines.EngineSite, afferent.engines.EnginePlan),
        *(afferent.engines.EngineProcess, afferent.engines.Caller, afferent.engines.RemoteLink),
        *(afferent.conformance.Subject,),
    ],
    ids=lambda each: each.__name__,
)
def test_help_describes_every_field_of_what_engines_use(described: Any) -> None:
    """``help()`` does not show a string after a field."""
    _, _, attributes = (inspect.getdoc(described) or "").partition("\nAttributes:\n")
    documented = re.findall(r"^ {4}(\w+): \S", attributes, re.MULTILINE)
    assert documented == list(inspect.signature(described).parameters)


def test_to_import_it_costs_next_to_nothing() -> None:
    """Each process of a server imports it, and most use little of it."""
    program = "import afferent, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"numpy", "msgspec", "asyncio", "torch"} & set(done.stdout.split())


def test_documents_and_examples_import_from_the_face_only() -> None:
    """The page on changes to the package itself is excepted."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
    for page in pages:
        if page.name == "adding-a-family.md":
            continue
        used = re.findall(r"^ *(?:from|import) (afferent[.\w]*)", page.read_text(), re.MULTILINE)
        assert set(used) <= set(FACES), page.name
