"""Measure the savings and the cost of a gate when requests arrive faster than they are served.

64 requests of 3 pages each (PNG, 1275 x 1650, all different) are sent at once to an engine that
only waits for each request:

- `producer`: 20 ms, so making the features is slower;
- `balanced`: as long as making the features of a request takes on this machine;
- `engine`: 400 ms.

The gates are:

- `bytes`: Afferent as it is, with an arena of 256 MiB.
- `off`, `1`, `2`, `4`, `8`: the same with an arena that is large enough for all requests, without
  and with a limit on the number of requests between admission and the engine's acceptance (as in
  LMDeploy's proposed gate).
- `4-held`: the same with permits that are held until a request's end. These show the effect of
  counting in our architecture, not LMDeploy's results.
- `control`: a baseline with the architecture of today's engines (`controls/api_server.py` names
  them), without a gate.

Our side is a store daemon, a frontend, two preprocess workers (nice 10) and a stub engine. The
baseline is a process with 8 threads that decode and one that processes, and a stub engine. Both can
use all cores.

Expected before the measurement, for the new gate: `4-held` bounds growth in all regimes to four
requests' features and a decode for each worker (80 to 130 MiB), as `bytes` does, at the same rate
in the engine-bound regime; its limit suits requests of one size only.

Growth is the maximal private memory of a side's processes, above its value before the run, plus the
arena: with `bytes` all of it, with the others the part that was in use.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from afferent.errors import ConfigError
from afferent.runtime import memory
from afferent.types import GiB, MiB
from benchmarks.controls.sockets import load_zmq
from benchmarks.gate_load import Sender, sending
from benchmarks.gate_scenario import (
    COUNTS,
    GATES,
    NUM_PAGES,
    NUM_REQUESTS,
    REGIMES,
    Scenario,
    choose,
)
from benchmarks.gate_servers import NUM_WORKERS, Starter, control, data_plane
from benchmarks.gate_side import Side
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row

QUESTION = (
    "What does a gate save under load, and what does it cost, beside counting requests and an "
    "engine's API process without one (vLLM)?"
)
COLUMNS = (
    "regime",
    "gate",
    "prefill_ms",
    "requests_per_s",
    "growth_mib",
    "base_mib",
    "ok",
    "refused",
)
_NOTE = (
    "off, 1 to 8 and 4-held: other gates on Afferent's own architecture, not on an engine's; "
    "control: an API process with 8 + 1 threads as engines have it, without a gate"
)
_NUM_CALIBRATIONS = 3
_GOAL_GROWTH, _GOAL_RATE = 0.15, 0.97

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, metavar="N", help=f"of each side; {MIN_SAMPLES}")
    parser.add_argument("--requests", type=int, metavar="N", help=f"at once; {NUM_REQUESTS}")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, help="all, if not given")
    parser.add_argument("--gates", nargs="+", choices=GATES, help="all, if not given")


def num_steps(*, quick: bool, **chosen: Any) -> int:
    scenario = choose(quick=quick, **chosen)
    calibrations = _NUM_CALIBRATIONS if "balanced" in scenario.regimes else 0
    return scenario.runs * len(scenario.regimes) * len(scenario.gates) + calibrations


def run(*, quick: bool, after_sample: AfterSample, **chosen: Any) -> Report:
    """Run the benchmark with the chosen options.

    Raises:
        ConfigError: There is not enough memory free, or a library is missing.
    """
    return measure(choose(quick=quick, **chosen), after_sample)


def measure(scenario: Scenario, after_sample: AfterSample) -> Report:
    """Measure a scenario.

    Raises:
        ConfigError: There is not enough memory free, or a library is missing.
    """
    _check(scenario)
    report = Report("gate", QUESTION, notes=[_NOTE])
    meter = BusyMeter()
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(sending(*scenario.page, num_pages=NUM_PAGES))
        starters = _starters(scenario, stack)
        for regime in scenario.regimes:
            prefill_s = scenario.prefill_s.get(regime)
            if prefill_s is None:
                prefill_s = _produce_s(scenario, starters, sender, after_sample)
            rows = _measure(regime, prefill_s, scenario, starters, sender, after_sample)
            report.rows += rows
            report.goals += _goals(regime, scenario, {row.keys["gate"]: row for row in rows})
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _check(scenario: Scenario) -> None:
    if "control" in scenario.gates:
        load_zmq()
    needed, free = scenario.needed_nbytes, memory.available_nbytes()
    if needed > free:
        raise ConfigError(
            f"this takes {needed / GiB:.1f} GiB of memory, and {free / GiB:.1f} GiB are free; "
            "choose fewer --requests, or --gates bytes"
        )
    seconds = scenario.estimated_s
    about = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} seconds"
    print(f"On an idle machine this takes about {about}.", file=sys.stderr)


def _starters(scenario: Scenario, stack: contextlib.ExitStack) -> dict[str, Starter]:
    """Return a starter for each side; processes that outlive their frontends are started here."""
    starters: dict[str, Starter] = {}
    if "bytes" in scenario.gates:
        plane = stack.enter_context(data_plane(scenario.arena_nbytes, counts_whole_arena=True))
        starters["bytes"] = plane.serve
    if any(gate in COUNTS for gate in scenario.gates):
        nbytes = scenario.unlimited_arena_nbytes
        plane = stack.enter_context(data_plane(nbytes, counts_whole_arena=False))
        for gate, (number, is_held) in COUNTS.items():
            starters[gate] = functools.partial(plane.serve, max_concurrency=number, is_held=is_held)
    if "control" in scenario.gates:
        starters["control"] = control
    return {gate: starters[gate] for gate in scenario.gates}


def _produce_s(
    scenario: Scenario, starters: Mapping[str, Starter], sender: Sender, after_sample: AfterSample
) -> float:
    """Return the time to make the features of a request, when nothing waits for the engine."""
    gate = "bytes" if "bytes" in starters else next(iter(starters))
    found = []
    with starters[gate](0.0) as server:
        for _ in range(_NUM_CALIBRATIONS):
            sender.prepare(server.port, scenario.num_requests)
            found.append(sender.send().elapsed_s / scenario.num_requests)
            after_sample()
    return statistics.median(found)


def _measure(
    regime: str,
    prefill_s: float,
    scenario: Scenario,
    starters: Mapping[str, Starter],
    sender: Sender,
    after_sample: AfterSample,
) -> list[Row]:
    with contextlib.ExitStack() as stack:
        sides = {
            gate: Side(starter, prefill_s, scenario.num_requests, sender)
            for gate, starter in starters.items()
        }
        for gate, side in sides.items():
            if gate != "control":
                stack.enter_context(side.living())
        for _ in range(scenario.runs):
            for side in sides.values():
                side.run()
                after_sample()
    keys = {"regime": regime, "prefill_ms": round(prefill_s * 1e3, 1)}
    return [Row({**keys, "gate": gate}, side.samples) for gate, side in sides.items()]


def _goals(regime: str, scenario: Scenario, rows: Mapping[str, Row]) -> list[Goal]:
    num_refused = max(max(row.samples["refused"]) for row in rows.values())
    goals = [Goal(f"{regime}: refused <= 0", not num_refused, num_refused)]
    if "bytes" not in rows:
        return goals
    ours = rows["bytes"]
    most_mib = (scenario.arena_nbytes + NUM_WORKERS * scenario.decode_nbytes) / MiB
    grown_mib = max(ours.samples["growth_mib"])
    goals.append(
        Goal(
            f"{regime}: growth of `bytes`, MiB, at most arena and a decode per worker: "
            f"{most_mib:.0f}",
            grown_mib <= most_mib,
            grown_mib,
        )
    )
    if len(rows) > 1:
        best = max(rows, key=lambda gate: rows[gate].median("requests_per_s"))
        rate = _ratio("requests_per_s", ours, rows[best])
        goals.append(
            Goal(
                f"{regime}: requests_per_s / best ({best}) >= {_GOAL_RATE}",
                rate >= _GOAL_RATE,
                rate,
            )
        )
    # With few requests, an arena for one or two of them is a large part of all.
    if regime == "engine" and "control" in rows and scenario.num_requests >= NUM_REQUESTS:
        growth = _ratio("peak_growth_nbytes", ours, rows["control"])
        goals.append(
            Goal(f"{regime}: growth / control <= {_GOAL_GROWTH}", growth <= _GOAL_GROWTH, growth)
        )
    return goals


def _ratio(name: str, ours: Row, other: Row) -> float:
    """Return the median ratio of neighbouring runs."""
    pairs = zip(ours.samples[name], other.samples[name], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)
