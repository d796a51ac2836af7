"""Release check: were the benchmark records measured with this code?

    python -m tools.measured_code

It lists for each record the packages that have changed since, and ends with 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.record import code

_RECORDS = Path(__file__).parents[1] / "docs" / "benchmarks"


def changed(record: Mapping[str, Any], now: Mapping[str, str]) -> list[str] | None:
    """Return the packages that have changed since a record; ``None`` if it does not name its code.

    Args:
        now: Digests of the packages, as from `benchmarks.record.code`.
    """
    measured = record.get("code")
    if measured is None:
        return None
    return sorted(name for name in measured | now if measured.get(name) != now.get(name))


def main() -> int:
    now, is_current = code(), True
    for path in sorted(_RECORDS.glob("*.json")):
        found = changed(msgspec.json.decode(path.read_bytes()), now)
        is_current = is_current and found == []
        if found is None:
            print(f"{path.name}: measured before records named their code")
        elif found:
            print(f"{path.name}: changed since: {', '.join(found)}")
        else:
            print(f"{path.name}: this code")
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
