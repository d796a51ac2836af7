"""The list of mutants fits the code; running them is `make mutants`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutant import Mutant
from tools.mutant_list import MUTANTS
from tools.mutants import BadMutant, mutated

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_each_changes_one_place_and_has_tests(mutant: Mutant) -> None:
    changed = mutated(mutant)
    compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text


@pytest.mark.parametrize("old", ["nobody wrote this", "import"])
def test_a_place_that_is_not_there_once_is_an_error(old: str) -> None:
    mutant = Mutant(what="x", file="admission/gate.py", old=old, new="", tests=())
    with pytest.raises(BadMutant, match="times"):
        mutated(mutant)
