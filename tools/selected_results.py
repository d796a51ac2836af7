"""Write the tables of selected results in README.md and docs/benchmarks/README.md.

python -m tools.selected_results --write
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.record import figure
from tools.records_page import FOLDER
from tools.written_page import DOCS, main

_BEGIN: Final = "<!-- written by tools/selected_results.py -->\n"
_END: Final = "<!-- end of the written part -->\n"
_HEAD: Final = (
    "| subject | Afferent | other side | ratio | resources |",
    "|---|---|---|---|---|",
)
_WHERE: Final = {
    DOCS.parent / "README.md": "docs/benchmarks/",
    FOLDER / "README.md": "",
}
"""Pages with a table, and the folder of the notes as seen from there."""


@dataclass(frozen=True, slots=True)
class Value:
    """Figure of a record: the product of columns in the one row with these keys."""

    record: str
    columns: str
    keys: Mapping[str, object]
    unit: str

    def find(self) -> list[float] | None:
        """Return the samples in its unit; ``None`` if the record has no such row."""
        record = json.loads((FOLDER / f"2026-11-{self.record}.json").read_text())
        columns = self.columns.split(" * ")
        for row in record["rows"]:
            samples = [row["samples"].get(each) for each in columns]
            if self.keys.items() <= row.items() and all(samples):
                return [math.prod(each) for each in zip(*samples, strict=True)]
        return None

    def text(self, samples: Sequence[float]) -> str:
        return f"{figure(statistics.median(samples))} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table.

    Attributes:
        subject: Text of which the part in brackets links to the note.
        other: Name of the other side.
        is_rate: Whether more is better.
        is_short: Whether it is in README.md, too.
    """

    subject: str
    ours: Value
    theirs: Value
    other: str
    resources: str
    is_rate: bool = False
    is_short: bool = False

    def line(self, folder: str) -> str | None:
        """Return the row; ``None`` if its record has no such figures yet."""
        ours, theirs = self.ours.find(), self.theirs.find()
        if ours is None or theirs is None:
            return None
        ratio = _ratio(ours, theirs) if self.is_rate else _ratio(theirs, ours)
        shown = f"{ratio:.2g}" if ratio < 100 else f"{ratio:.0f}"
        subject = self.subject.replace("]", f"]({folder}2026-11-{self.ours.record}.md)", 1)
        shown = f"**{shown}**" if ratio < 1 else shown
        other = f"{self.theirs.text(theirs)}: {self.other}"
        cells = (subject, self.ours.text(ours), other, shown, self.resources)
        return f"| {' | '.join(cells)} |"


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median ratio of neighbouring samples; of the medians, if the numbers differ."""
    if len(above) != len(below):
        return statistics.median(above) / statistics.median(below)
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def _pair(
    record: str,
    columns: str,
    unit: str,
    ours: Mapping[str, object],
    theirs: Mapping[str, object],
) -> tuple[Value, Value]:
    """Return two rows of one column."""
    return Value(record, columns, ours, unit), Value(record, columns, theirs, unit)


def _beside(
    record: str, ours: str, theirs: str, unit: str, keys: Mapping[str, object]
) -> tuple[Value, Value]:
    """Return two columns of one row."""
    return Value(record, ours, keys, unit), Value(record, theirs, keys, unit)


def _in_front(column: str, case: str, c: int, unit: str) -> tuple[Value, Value]:
    keys = {"case": case, "c": c}
    return _pair("vllm", column, unit, {**keys, "side": "afferent"}, {**keys, "side": "stock"})


def _render(column: str, case: str, c: int, unit: str) -> tuple[Value, Value]:
    keys = {"case": case, "c": c}
    return _pair("render", column, unit, {**keys, "side": "afferent"}, {**keys, "side": "vllm"})


def _text(column: str, unit: str) -> tuple[Value, Value]:
    return _pair("vllm", column, unit, {"case": "text, through"}, {"case": "text, direct"})


def _job(column: str, ours: str, theirs: str) -> tuple[Value, Value]:
    files = {"files": "JPEG 640 x 480"}
    return _pair("batch-job", column, "ms", {**files, "side": ours}, {**files, "side": theirs})


def _gateway(other: str) -> tuple[Value, Value]:
    keys = {"body": "image"}
    return _pair("gateway", "cpu_ms", "ms", {**keys, "side": "gateway"}, {**keys, "side": other})


def _burst(regime: str, gate: str) -> tuple[Value, Value]:
    keys = {"regime": regime}
    return _pair("gate", "growth_mib", "MiB", {**keys, "gate": "bytes"}, {**keys, "gate": gate})


_BOTH: Final = "Afferent and vLLM's API server"
_SAME: Final = "the same"
RESULTS: Final[Sequence[Result]] = (
    Result(
        "[repeats in front of vLLM], c = 64",
        *_in_front("requests_per_s", "repeats", 64, "req/s"),
        "vLLM alone",
        "embeddings in the arena",
        is_rate=True,
        is_short=True,
    ),
    Result(
        "[CPU time of these], without the engine",
        *_in_front("cpu_ms", "repeats", 64, "ms"),
        "vLLM alone",
        _BOTH,
    ),
    Result(
        "[new images], CPU time without the engine, c = 16",
        *_in_front("cpu_ms", "misses", 16, "ms"),
        "vLLM alone",
        _BOTH,
        is_short=True,
    ),
    Result(
        "[memory] after 870 pages, without the worker",
        *_in_front("outside_mb", "memory", 0, "MB"),
        "vLLM alone",
        "1 GiB of it is the arena",
        is_short=True,
    ),
    Result(
        "[features of a new page], c = 64",
        *_render("requests_per_s", "misses", 64, "req/s"),
        "vLLM's render server",
        "all processes of both",
        is_rate=True,
    ),
    Result(
        "[of a known page], c = 16, CPU time",
        *_render("cpu_ms", "hits", 16, "ms"),
        "vLLM's render server",
        _SAME,
    ),
    Result(
        "[a request without media], CPU time",
        *_text("cpu_ms", "ms"),
        "vLLM alone",
        _BOTH,
        is_short=True,
    ),
    Result(
        "[such requests] a second, c = 16",
        *_text("requests_per_s", "req/s"),
        "vLLM alone",
        _SAME,
        is_rate=True,
    ),
    Result(
        "[a repeated image], CPU time",
        *_beside("body", "cpu_ms", "control_cpu_ms", "ms", {"case": "hit"}),
        "baseline, decodes before the lookup",
        "one frontend each",
    ),
    Result(
        "[20 MB of media in a body], heap",
        *_beside("body", "heap_mb", "control_heap_mb", "MB", {"case": "body"}),
        "baseline, reads the whole body",
        "one process each; Afferent's has an arena",
    ),
    Result(
        "[100 images' features, to 2 workers]",
        *_beside("images", "afferent_ms", "control_zmq_ms", "ms", {"images": 100}),
        "ZMQ, then a warm ring",
        "Afferent has one daemon more",
    ),
    Result(
        "[100 images, all stages]",
        *_beside("images", "whole_ms", "control_whole_ms", "ms", {"images": 100}),
        "baseline",
        "two processes and a daemon; two threads",
    ),
    Result(
        "[one image], from the body to the workers",
        *_beside("images", "whole_ms", "control_whole_ms", "ms", {"images": 1}),
        "baseline: one process, tensors copied",
        "Afferent has a daemon more",
        is_short=True,
    ),
    Result(
        "[JPEGs of 1275 x 1650] a second",
        *_pair(
            *("preprocess", "items_per_s", ""),
            {"format": "JPEG", "width": 1275, "path": "fast"},
            {"format": "JPEG", "width": 1275, "path": "hf_2_processes"},
        ),
        "the model's own processor, torchvision",
        "two processes each",
        is_rate=True,
    ),
    Result(
        "[an image in a batch job], CPU time, same floats",
        *_pair("feature-batch", "cpu_ms", "ms", {"path": "hf"}, {"path": "processor"}),
        "the model's own processor, torchvision",
        "one process each",
    ),
    Result(
        "[10,000 photographs in a batch job], elapsed time a file, compact",
        *_job("wall_ms", "pool", "loader"),
        "that processor in a `DataLoader`, floats",
        "three processes; Afferent has a daemon more",
    ),
    Result(
        "[the same], CPU time, same floats",
        *_job("cpu_ms", "pool_hf", "ray_data"),
        "that processor in Ray Data",
        "all processes of both",
    ),
    Result(
        "[a body of 5 MB through a gateway], CPU time",
        *_gateway("vllm_router"),
        "vllm-router",
        "all processes of both",
    ),
    Result(
        "[the same]",
        *_gateway("control"),
        "a Python stream that hashes",
        "all processes of Afferent; one process",
    ),
    Result(
        "[growth in a burst], slow engine",
        *_burst("engine", "1"),
        "one request at a time",
        "256 MiB of it is the arena",
    ),
    Result("[the same]", *_burst("engine", "4-held"), "four at a time, until they end", _SAME),
    Result("[the same], slow features", *_burst("producer", "2"), "two requests at a time", _SAME),
    Result(
        "[100 images' tensors], in memcpys",
        *_beside("codec", "one_thread_ratio", "engine_ratio", "", {"images": 100}),
        "vLLM's encoder",
        "one thread each",
    ),
    Result(
        "[copies of 100 MB to a GPU]",
        *_beside("gpu", "locked_gbps", "pin_memory_gbps", "GB/s", {"nbytes": 100_000_000}),
        "over `pin_memory`",
        "one process; the arena's pages are locked",
        is_rate=True,
    ),
    Result(
        "[put of 1 MB]",
        *_beside(
            *("store", "memcpy_ms * put_ratio", "memcpy_ms * control_ring_put_ratio", "ms"),
            {"nbytes": 1_000_000, "readers": 1},
        ),
        "a warm ring",
        "one process each",
    ),
)


def table(page: Path) -> str:
    """Return the table of a page, with the lines around it."""
    is_long = page.parent == FOLDER
    found = (each.line(_WHERE[page]) for each in RESULTS if is_long or each.is_short)
    lines: Iterator[str] = (line for line in found if line is not None)
    return _BEGIN + "".join(f"{line}\n" for line in (*_HEAD, *lines)) + _END


def written(page: Path) -> str:
    """Return the text of a page with the table of the records."""
    pattern = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.S)
    text, number = pattern.subn(lambda _: table(page), page.read_text(encoding="utf-8"))
    if number != 1:
        raise ValueError(f"{page} has no place for the table")
    return text


if __name__ == "__main__":
    sys.exit(max(main(page, functools.partial(written, page)) for page in _WHERE))
