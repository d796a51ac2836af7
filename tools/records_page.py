"""Write the page with the figures of all benchmark records, ``docs/benchmarks/records.md``.

python -m tools.records_page --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import figure, named, spread
from tools.written_page import DOCS, main

FOLDER = DOCS / "benchmarks"
PAGE = FOLDER / "records.md"

_ABOUT = """\
# The figures of all records

Written by `python -m tools.records_page --write` from the raw records beside this page. Each cell
is a median, with the least and the greatest value; the columns have the names of the record. A
note's text describes the run that it names. Where its record was measured again since, the newer
figures are here.
"""


def write_page(folder: Path = FOLDER) -> str:
    """Return the page of all records of a folder."""
    parts = [_ABOUT]
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if "benchmark" in record:  # else another program's output
            parts += _section(path.stem.removeprefix("2026-11-"), record)
    return "\n".join(parts) + "\n"


def _section(name: str, record: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}\n"
    yield (
        f"{named(record['machine'])};\n{record['busy_cores_elsewhere']:.2f} cores busy elsewhere; "
        f"[raw record](2026-11-{name}.json).\n"
    )
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        keys = [key for key in row if key != "samples" and key not in row["samples"]]
        groups.setdefault((*keys, *row["samples"]), []).append(row)
    for columns, rows in groups.items():
        yield f"| {' | '.join(f'`{column}`' for column in columns)} |"
        yield "|---" * len(columns) + "|"
        yield from (f"| {' | '.join(_cell(row, column) for column in columns)} |" for row in rows)
        yield ""
    goals = record["goals"]
    if goals:
        yield "| goal | figure | |\n|---|---|---|"
        for goal in goals:
            what = goal["what"].replace("|", r"\|")
            outcome = "met" if goal["met"] else "missed"
            yield f"| {what} | {figure(goal['value'])} | {outcome} |"
        yield ""


def _cell(row: Mapping[str, Any], column: str) -> str:
    samples = row["samples"].get(column)
    if samples is None:
        return str(row.get(column, "")).replace("|", r"\|")
    median = figure(row[column])
    return median if len(samples) == 1 else f"{median} ({spread(samples)})"


if __name__ == "__main__":
    sys.exit(main(PAGE, write_page))
