"""Predict the rates of a large node from the costs of each process, and check that on this one.

The costs are the processor time of each process for a request whose features are made (or found),
and that reaches no engine. The prediction is simple: a process on a core of its own handles
``1 / cost`` requests a second; the slowest kind of process is the limit, or all cores together.

The check: a server on one core and one on two, with clients on the same machine, whose time is
measured, too. The arena is full, or it fills (``filling``): then the daemon gets new memory. One
client (``c``) is half a load for two cores; then the arena may fill as fast as it was full.

``--cores`` adds a server on more cores, and clients on all others. Its rates are predicted from the
costs on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from afferent.errors import ConfigError
from afferent.types import MiB
from benchmarks import senders
from benchmarks.children import cpu_s
from benchmarks.peers import servers
from benchmarks.peers.load import Pages, bodies_of, put
from benchmarks.peers.servers import Side
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row

QUESTION = "Which process limits a node of 128 cores, and at which rate?"
KINDS: Final = ("frontend", "store", "dispatcher", "worker", "rest")
COLUMNS = (
    *("case", "cores", "c", "requests_per_s", "predicted_per_s"),
    *(f"{kind}_ms" for kind in KINDS),
    "client_ms",
)

_SIZES = {"page": (1275, 1650), "small": (640, 480)}
_C: Final = 8
_CASES = (
    ("page", "filling", _C),
    ("page", "filling", 1),
    ("page", "misses", 1),
    *((*case, _C) for case in itertools.product(_SIZES, ("misses", "hits"))),
)
_PATH = "/v1/chat/completions/render?features=1"
_NUM = {
    ("page", "filling"): 16,
    ("page", "misses"): 64,
    ("page", "hits"): 600,
    ("small", "misses"): 320,
    ("small", "hits"): 1000,
}
_NUM_KNOWN = 12
_ARENA_NBYTES = 3072 * MiB
_NUM_FILLING = 300
"""New pages that fill the arena."""
_MODULES = (
    ("store", re.compile(r"afferent\.store\.daemon")),
    ("frontend", re.compile(r"afferent\.(builtin|proxy)\.frontend")),
    ("pool", re.compile(r"afferent\.media\.workers\.pool")),
)
_MOST_CORES: Final = 2
"""Cores of the check on every machine."""
_C_PER_CORE: Final = 4
"""Clients for each core of a server on more cores."""
_LARGE_ROUNDS: Final = 3
_LARGE_FACTOR: Final = 8
"""Requests of a round there, as a multiple."""
_LARGE_CORES, _FRONTENDS, _WORKERS = 128, 16, 128
"""A large node, and the defaults there (docs/deploying.md)."""
_TOLERANCE = 0.15
_GOAL_FILLING_MS, _GOAL_FILLING_RATE = 2.0, 0.9

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cores", type=int, help="of one more server; the clients get the others")
    parser.add_argument("--frontends", type=int, default=4, help="of that server (default: 4)")


def num_steps(*, quick: bool, cores: int | None, frontends: int) -> int:
    large = len(_NUM) * _LARGE_ROUNDS if cores else 0
    return 2 * len(_CASES) * _num_rounds(quick=quick) + large


def _num_rounds(*, quick: bool) -> int:
    return 2 if quick else MIN_SAMPLES


def run(*, quick: bool, cores: int | None, frontends: int, after_sample: AfterSample) -> Report:
    """Run the benchmark.

    Raises:
        ConfigError: ``cores`` leaves no core for the clients.
    """
    all_cores = sorted(os.sched_getaffinity(0))
    if cores is not None and not 0 < cores < len(all_cores):
        raise ConfigError(f"--cores is from 1 to {len(all_cores) - 1}: the clients need one")
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
                for size, case, c in _CASES:
                    number = _num_rounds(quick=quick)
                    rounds = list(_rounds(side, files, size, case, c, number, after_sample))
                    report.rows.append(_row(size, case, num_cores, c, rounds))
        loaded = [
            row for row in report.rows if row.keys["cores"] == _MOST_CORES and row.keys["c"] == _C
        ]
        if cores is not None:
            costs_of = {row.keys["case"]: row for row in loaded}
            report.rows += _on_more_cores(
                model,
                files,
                costs_of,
                all_cores[:cores],
                all_cores[cores:],
                frontends,
                after_sample,
            )
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.notes = [_large_node(row) for row in loaded]
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


def _on_more_cores(
    model: Path,
    files: Mapping[str, Pages],
    costs_of: Mapping[Any, Row],
    server_cores: Sequence[int],
    client_cores: Sequence[int],
    frontends: int,
    after_sample: AfterSample,
) -> Iterator[Row]:
    """Measure a server on many cores; predict its rates from the costs on two."""
    num_cores = len(server_cores)
    counts = {"frontend": frontends, "store": 1, "dispatcher": 1, "worker": num_cores}
    flags = [
        *("--frontends", str(frontends), "--preprocess-workers", str(num_cores)),
        *("--arena-nbytes", str(_ARENA_NBYTES)),
    ]
    bound_to = ",".join(map(str, server_cores))
    with (
        servers.afferent_render(model, *flags, core=bound_to) as side,
        senders.on_cores(client_cores) as send,
    ):
        for size, case in _NUM:
            asked = _NUM[size, case] * _LARGE_FACTOR
            known = files[size].fresh(_NUM_KNOWN)
            if case != "filling":
                send(side.url + _PATH, files["page"].fresh(_NUM_FILLING), num_cores)
                send(side.url + _PATH, known, num_cores)
            samples: dict[str, list[float]] = {}
            for _ in range(_LARGE_ROUNDS):
                bodies = bodies_of(files[size], known, asked, are_new=case != "hits")
                before = costs(side)
                took = send(side.url + _PATH, bodies, _C_PER_CORE * num_cores)
                each = {
                    f"{kind}_ms": 1e3 * (at_s - before[kind]) / asked
                    for kind, at_s in costs(side).items()
                }
                each["client_ms"] = 1e3 * took.cpu_s / asked
                each["requests_per_s"] = asked / took.wall_s
                for name, value in each.items():
                    samples.setdefault(name, []).append(value)
                after_sample()
            row = costs_of[f"{size}, {case}"]
            costs_ms = {kind: row.median(f"{kind}_ms") for kind in KINDS}
            predicted = min(limits(costs_ms, counts, num_cores).values())
            samples["predicted_per_s"] = [predicted] * _LARGE_ROUNDS
            keys = {"case": f"{size}, {case}", "cores": num_cores, "c": _C_PER_CORE * num_cores}
            yield Row(keys, samples)


def _rounds(
    side: Side,
    files: Mapping[str, Pages],
    size: str,
    case: str,
    c: int,
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
        load = put(side, _PATH, bodies, c)
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


def _row(
    size: str, case: str, num_cores: int, c: int, rounds: Sequence[Mapping[str, float]]
) -> Row:
    samples = {name: [each[name] for each in rounds] for name in rounds[0]}
    samples["predicted_per_s"] = [_predicted(each, num_cores) for each in rounds]
    return Row({"case": f"{size}, {case}", "cores": num_cores, "c": c}, samples)


def _predicted(costs_ms: Mapping[str, float], num_cores: int) -> float:
    """Return the rate of a server on this machine's cores, some of which the client uses."""
    ours = sum(costs_ms[f"{kind}_ms"] for kind in KINDS)
    if num_cores == 1:
        return 1e3 / ours
    everything = 1e3 * (os.cpu_count() or 1) / (ours + costs_ms["client_ms"])
    return min(everything, 1e3 / costs_ms["frontend_ms"])


def _goals(rows: Sequence[Row]) -> list[Goal]:
    goals = list(_goals_of_filling(rows))
    for row in rows:
        if row.keys["c"] == 1:
            continue
        ratio = row.median("requests_per_s") / row.median("predicted_per_s")
        what = f"{row.keys['case']}, {row.keys['cores']} cores: measured / predicted within 15 %"
        goals.append(Goal(what, abs(ratio - 1) <= _TOLERANCE, ratio))
    return goals


def _goals_of_filling(rows: Sequence[Row]) -> Iterator[Goal]:
    """Compare pages on two cores while the arena fills with those of a full one."""
    found = {
        (row.keys["case"], row.keys["c"]): row for row in rows if row.keys["cores"] == _MOST_CORES
    }
    cost_ms = {
        case: sum(found[case, _C].median(f"{kind}_ms") for kind in KINDS)
        for case in ("page, filling", "page, misses")
    }
    more_ms = cost_ms["page, filling"] - cost_ms["page, misses"]
    what = f"filling: at most {_GOAL_FILLING_MS:g} ms more processor time for a page"
    yield Goal(what, more_ms <= _GOAL_FILLING_MS, more_ms)
    rate = found["page, filling", 1].median("requests_per_s")
    rate /= found["page, misses", 1].median("requests_per_s")
    what = f"filling, one client: at least {_GOAL_FILLING_RATE:g} of a full arena's requests/s"
    yield Goal(what, rate >= _GOAL_FILLING_RATE, rate)


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
