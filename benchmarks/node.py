"""Predict the rates of a large node from the costs of each process, and check that on this one.

The costs are the processor time of each process for a request whose features are made (or found),
and that reaches no engine. The prediction is simple: a process on a core of its own handles
``1 / cost`` requests a second; the slowest kind of process is the limit, or all cores together.

The check: a server on one core and one on two, with clients on the same machine, whose time is
measured, too. The arena is full, or it fills (``filling``): then the daemon gets new memory.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from afferent.types import MiB
from benchmarks.children import cpu_s
from benchmarks.peers import servers
from benchmarks.peers.load import Pages, bodies_of, put
from benchmarks.peers.servers import Side
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row

QUESTION = "Which process limits a node of 128 cores, and at which rate?"
KINDS: Final = ("frontend", "store", "dispatcher", "worker", "rest")
COLUMNS = (
    *("case", "cores", "requests_per_s", "predicted_per_s"),
    *(f"{kind}_ms" for kind in KINDS),
    "client_ms",
)

_SIZES = {"page": (1275, 1650), "small": (640, 480)}
_CASES = (
    ("page", "filling"),
    *itertools.product(_SIZES, ("misses", "hits")),
)
_PATH = "/v1/chat/completions/render?features=1"
_NUM = {
    ("page", "filling"): 16,
    ("page", "misses"): 64,
    ("page", "hits"): 600,
    ("small", "misses"): 320,
    ("small", "hits"): 1000,
}
_NUM_KNOWN, _C = 12, 8
_ARENA_NBYTES = 2048 * MiB
_NUM_FILLING = 200
"""New pages that fill the arena."""
_MODULES = (
    ("store", re.compile(r"afferent\.store\.daemon")),
    ("frontend", re.compile(r"afferent\.(builtin|proxy)\.frontend")),
    ("pool", re.compile(r"afferent\.media\.workers\.pool")),
)
_MOST_CORES: Final = 2
"""Cores of the check; a machine of more would need more clients."""
_LARGE_CORES, _FRONTENDS, _WORKERS = 128, 16, 128
"""A large node, and the defaults there (docs/deploying.md)."""
_TOLERANCE = 0.15

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    return 2 * len(_CASES) * _num_rounds(quick=quick)


def _num_rounds(*, quick: bool) -> int:
    return 2 if quick else MIN_SAMPLES


def run(*, quick: bool, after_sample: AfterSample) -> Report:
    report, meter = Report("node", QUESTION), BusyMeter()
    with tempfile.TemporaryDirectory() as folder:
        model = servers.make_model(Path(folder))
        files = {name: Pages(*sides) for name, sides in _SIZES.items()}
        for num_cores in (1, _MOST_CORES):
            flags = [
                *("--frontends", "1", "--preprocess-workers", str(num_cores)),
                *("--arena-nbytes", str(_ARENA_NBYTES)),
            ]
            core = 0 if num_cores == 1 else None
            with servers.afferent_render(model, *flags, core=core) as side:
                for size, case in _CASES:
                    rounds = list(
                        _rounds(side, files, size, case, _num_rounds(quick=quick), after_sample)
                    )
                    report.rows.append(_row(size, case, num_cores, rounds))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.notes = [_large_node(row) for row in report.rows if row.keys["cores"] == _MOST_CORES]
    report.goals = list(_goals(report.rows))
    return report


def _large_node(row: Row) -> str:
    """Describe the limits of a node of 128 cores, with the default number of its processes."""
    costs_ms = {kind: row.median(f"{kind}_ms") for kind in KINDS}
    counts = {"frontend": _FRONTENDS, "store": 1, "dispatcher": 1, "worker": _WORKERS}
    found = limits(costs_ms, counts, num_cores=_LARGE_CORES)
    rates = ", ".join(
        f"{kind} {rate:,.0f}" for kind, rate in sorted(found.items(), key=itemgetter(1))
    )
    return f"{row.keys['case']}, {_LARGE_CORES} cores: requests a second at most: {rates}"


def _rounds(
    side: Side,
    files: Mapping[str, Pages],
    size: str,
    case: str,
    number: int,
    after_sample: AfterSample,
) -> list[dict[str, float]]:
    pages, asked = files[size], _NUM[size, case]
    known = pages.fresh(_NUM_KNOWN)
    if case != "filling":
        put(side, _PATH, files["page"].fresh(_NUM_FILLING), 4)
        put(side, _PATH, known, 4)
    found = []
    for _ in range(number):
        bodies = bodies_of(pages, known, asked, are_new=case != "hits")
        before, client_s = costs(side), time.process_time()
        load = put(side, _PATH, bodies, _C)
        each = {
            f"{kind}_ms": 1e3 * (at_s - before[kind]) / asked for kind, at_s in costs(side).items()
        }
        each["client_ms"] = 1e3 * (time.process_time() - client_s) / asked
        found.append({**each, "requests_per_s": load.requests_per_s})
        after_sample()
    return found


def costs(side: Side) -> dict[str, float]:
    """Return the processor time so far of each kind of process, in seconds."""
    lines = dict(servers.tree(side.popen.pid))
    found = dict.fromkeys(KINDS, 0.0)
    for pid, line in lines.items():
        kind = next((name for name, module in _MODULES if module.search(line)), "rest")
        if kind == "pool":
            is_child = lines.get(_parent(pid), "") == line
            kind = "worker" if is_child else "dispatcher"
        found[kind] += cpu_s(pid)
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _row(size: str, case: str, num_cores: int, rounds: Sequence[Mapping[str, float]]) -> Row:
    samples = {name: [each[name] for each in rounds] for name in rounds[0]}
    samples["predicted_per_s"] = [_predicted(each, num_cores) for each in rounds]
    return Row({"case": f"{size}, {case}", "cores": num_cores}, samples)


def _predicted(costs_ms: Mapping[str, float], num_cores: int) -> float:
    """Return the rate of a server on this machine's cores, some of which the client uses."""
    ours = sum(costs_ms[f"{kind}_ms"] for kind in KINDS)
    if num_cores == 1:
        return 1e3 / ours
    everything = 1e3 * (os.cpu_count() or 1) / (ours + costs_ms["client_ms"])
    return min(everything, 1e3 / costs_ms["frontend_ms"])


def _goals(rows: Sequence[Row]) -> list[Goal]:
    goals = []
    for row in rows:
        ratio = row.median("requests_per_s") / row.median("predicted_per_s")
        what = f"{row.keys['case']}, {row.keys['cores']} cores: measured / predicted within 15 %"
        goals.append(Goal(what, abs(ratio - 1) <= _TOLERANCE, ratio))
    return goals


def limits(
    costs_ms: Mapping[str, float], counts: Mapping[str, int], num_cores: int
) -> dict[str, float]:
    """Return the requests a second that each kind of process could handle on a larger node.

    Args:
        costs_ms: Processor time for a request, by kind of process.
        counts: Processes of each kind.
        num_cores: Cores for all of them together, which are a limit of their own.
    """
    found = {kind: 1e3 * counts[kind] / costs_ms[kind] for kind in counts if costs_ms[kind] > 0}
    return {**found, "cores": 1e3 * num_cores / sum(costs_ms.values())}
