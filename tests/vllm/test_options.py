"""With each of vLLM's options, the answers are those of a stock vLLM with the same options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DOCS
from tests.vllm.options import OPTIONS, Option, write_adapter
from tests.vllm.servers import SHAPES, TOOLS, Stock, supervised

PAGE = DOCS / "vllm-options.md"


@pytest.mark.vllm
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flags.removeprefix("--"))
def test_the_answers_are_those_of_a_stock_vllm(option: Option, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    given = [each.replace("{adapter}", str(adapter)) for each in option.arguments]
    if option.flags != "--runner":
        given = [*TOOLS, *given]
    with Stock(SHAPES, "--served-model-name", "shapes", *given) as stock:
        expected = option.ask(stock.url)
    with supervised(vllm=given) as server:
        found = option.ask(server.url)
        metrics = server.metrics()
    differ = [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]
    print(f"{option.flags}: {len(found)} answers, {len(differ)} differ")
    assert not differ
    counted = {
        way: metrics[f'afferent_upstream_items_total{{modality="image",way="{way}"}}']
        for way in ("features", "bytes")
    }
    assert {way for way, number in counted.items() if number} == {option.way}


def test_each_tested_option_is_in_the_table_of_the_docs() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    for option in OPTIONS:
        (row,) = [line for line in rows if line.startswith(f"| `{option.flags}`")]
        assert ("media go as bytes" in row) == (option.way == "bytes")
