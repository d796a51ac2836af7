"""The table of models matches the families."""

from __future__ import annotations

from typing import Final

from afferent.media.families.native import ENTRIES
from tests.vllm.models_page import read_table

COMPARED: Final = {
    model_type for entry in ENTRIES for model_type in entry.engine.compared_with.get("vllm", ())
}


def test_page_lists_each_model_that_gets_features() -> None:
    assert {row.model_type for row in read_table() if row.media} == COMPARED


def test_page_gives_the_reason_of_each_other_family() -> None:
    rows = [row for row in read_table() if not row.media]
    types = {row.model_type for row in rows}
    assert not types & COMPARED
    covered = {model_type for entry in ENTRIES for model_type in entry.model_types}
    assert covered <= types | COMPARED
    assert all(len(row.cells[-1]) > 10 for row in rows)


def test_each_model_stands_once_on_the_page() -> None:
    types = [row.model_type for row in read_table()]
    assert len(types) == len(set(types))
