"""The tables of docs/vllm-models.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.pages import DOCS


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table, once for each of its model types."""

    model_type: str
    cells: tuple[str, ...]

    @property
    def media(self) -> set[str]:
        """Media with features, in the first table."""
        return set(self.cells[2].split(", "))


def read_table(heading: str) -> list[Row]:
    """Return the rows of the table below a heading."""
    text = (DOCS / "vllm-models.md").read_text()
    section = re.split(r"^## ", text.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [tuple(cell.strip() for cell in line.strip("| ").split(" |")) for line in lines]
    return [
        Row(model_type, cells) for cells in rows for model_type in re.findall("`(.+?)`", cells[0])
    ]
