"""Draw a record of the render benchmark as a picture for its note.

python -m benchmarks.plot docs/benchmarks/2026-11-render.json docs/pictures/render.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _LEFT, _RIGHT = 760, 150, 150
_BAR, _ROW, _TOP = 15, 46, 58
_SIDES = (("afferent", "#2a9d8f"), ("vllm", "#8d99ae"))
_NAMES = {"afferent": "Afferent", "vllm": "vllm launch render"}
_CASES = {"misses": "new pages", "hits": "known pages"}
_TEXT = "#6e7781"
"""Readable on white and on black."""


@dataclass(frozen=True, slots=True)
class _Bars:
    """Requests a second of each side in one case, with the median, the minimum and the maximum."""

    case: str
    c: int
    samples: dict[str, list[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.samples[side])

    @property
    def ratio(self) -> float:
        """Median ratio of neighbouring turns."""
        pairs = zip(self.samples["afferent"], self.samples["vllm"], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def picture(record: str) -> str:
    """Return a record as SVG."""
    found = json.loads(record)
    bars = list(_bars(found["rows"]))
    height = _TOP + _ROW * len(bars)
    longest = max(max(each.samples[side]) for each in bars for side, _ in _SIDES)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT}" role="img">',
        "<title>Requests a second until the features of a page exist</title>",
        _words(8, 18, "Requests a second until the features of a page exist", weight=600, size=14),
        *_legend(machine),
    ]
    for at, each in enumerate(bars):
        lines += _group(each, _TOP + _ROW * at, scale)
    return "\n".join([*lines, "</svg>", ""])


def _bars(rows: Sequence[Any]) -> Iterator[_Bars]:
    by_key: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in rows:
        samples = row["samples"]["requests_per_s"]
        by_key.setdefault((row["case"], row["c"]), {})[row["side"]] = samples
    for (case, c), sides in by_key.items():
        yield _Bars(case, c, sides)


def _legend(machine: str) -> Iterator[str]:
    x = 8
    for side, colour in _SIDES:
        yield f'<rect x="{x}" y="29" width="11" height="11" rx="2" fill="{colour}"/>'
        yield _words(x + 16, 39, _NAMES[side])
        x += 34 + 7 * len(_NAMES[side])
    yield _words(_WIDTH - 8, 39, machine, anchor="end")


def _group(bars: _Bars, top: float, scale: float) -> Iterator[str]:
    clients = f"{bars.c} client{'s' if bars.c > 1 else ''}"
    yield _words(_LEFT - 10, top + 14, _CASES[bars.case], anchor="end", weight=600)
    yield _words(_LEFT - 10, top + 28, clients, anchor="end")
    for at, (side, colour) in enumerate(_SIDES):
        y, median = top + at * (_BAR + 3), bars.median(side)
        low, high = min(bars.samples[side]) * scale, max(bars.samples[side]) * scale
        yield (
            f'<rect x="{_LEFT}" y="{y}" width="{max(median * scale, 1):.1f}" height="{_BAR}" '
            f'rx="2" fill="{colour}"/>'
        )
        yield (
            f'<path d="M{_LEFT + low:.1f} {y + _BAR / 2}H{_LEFT + high:.1f}" '
            f'stroke="{_TEXT}" stroke-width="1.5"/>'
        )
        said = f"{median:,.0f}" if median >= 10 else f"{median:.1f}"
        if side == "afferent":
            said += f"  ({bars.ratio:.1f} times)"
        yield _words(_LEFT + max(high, median * scale) + 7, y + 12, said)


def _words(
    x: float, y: float, said: str, *, anchor: str = "start", weight: int = 400, size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{escape(said)}</text>'
    )


def main(source: Path, target: Path) -> None:
    target.write_text(picture(source.read_text()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
