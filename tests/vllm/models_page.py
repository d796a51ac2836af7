"""The table of docs/models.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.pages import DOCS


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table, once for each of its model types."""

    model_type: str
    cells: tuple[str, ...]

    @property
    def media(self) -> set[str]:
        """Media with features in front of vLLM."""
        return set(self.cells[2].split(", ")) - {"bytes"}


def read_table() -> list[Row]:
    lines = [line for line in (DOCS / "models.md").read_text().splitlines() if line[:3] == "| `"]
    rows = [tuple(cell.strip() for cell in line.strip("| ").split(" |")) for line in lines]
    return [
        Row(model_type, cells) for cells in rows for model_type in re.findall("`(.+?)`", cells[0])
    ]
