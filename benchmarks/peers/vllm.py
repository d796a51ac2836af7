"""Measure the cost of images in front of vLLM, compared with vLLM's own API server.

Two servers with the same model run at the same time and work in turn: Afferent with its own vLLM,
and a stock ``vllm serve``, or one with the best settings for this load (``--against best``: two API
servers, the processor cache in shared memory). Pages are PNGs of 1275 x 1650, with an answer of one
token. The engine (core and worker) runs on the same two cores, so it limits the rate of misses. The
compared values are the processor time of all other processes, and memory.

The benchmark needs an environment with vLLM (``make setup-vllm``), and takes some twenty minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from afferent.errors import ConfigError
from benchmarks.peers import servers
from benchmarks.peers.load import Load, Pages, bodies_of, put, put_in_vllm
from benchmarks.peers.servers import MODEL, Side
from benchmarks.record import BusyMeter, Goal, Report, Row, quiet_rounds
from tools import vllm_env

QUESTION = "What do images cost in front of vLLM, and behind its own API server?"
MEASURED = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms", "engine_cpu_ms", "queue_ms")
"""Figures of a `Load` that a row has."""
COLUMNS = ("side", "case", "c", *MEASURED, "outside_mb", "worker_mb")

_THREADS = "OMP_NUM_THREADS"
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_PATH = "/v1/chat/completions"
_CASES = (
    ("misses", 1),
    ("misses", 16),
    ("misses", 64),
    ("repeats", 1),
    ("repeats", 16),
    ("repeats", 64),
)
_NUM_REQUESTS = {1: 8, 16: 32, 64: 64}
_NUM_REPEATS = 64
_FIRST_REPEATS = ("repeats", 1)
_NUM_KNOWN = 16
_NUM_TEXT, NUM_PAIRS = 200, 20

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", choices=("stock", "best"), default="stock", help="vLLM's settings"
    )
    parser.add_argument(
        "--only", choices=("misses", "repeats", "text"), help="leave out the others"
    )
    parser.add_argument("--mixed", action="store_true", help="half of the pages are JPEGs")
    parser.add_argument("--frontends", type=int, default=1, help="of Afferent; 1 by default")
    parser.add_argument(
        "--engine-threads",
        type=int,
        default=int(servers.CPU.env[_THREADS]),
        help="threads of each engine's operators; 2 by default",
    )
    parser.add_argument(
        "--python", type=Path, default=vllm_env.python_of(vllm_env.FOLDER), help="with vLLM"
    )


def num_steps(*, quick: bool, only: str | None, **_: object) -> int:
    num_pairs = NUM_PAIRS if _is_wanted("text", only) else 0
    return len(_cases(only)) * 2 * _num_rounds(quick=quick) + 2 * num_pairs


def _cases(only: str | None) -> list[tuple[str, int]]:
    return [(case, c) for case, c in _CASES if _is_wanted(case, only)]


def _is_wanted(case: str, only: str | None) -> bool:
    return only in (None, case)


def _num_rounds(*, quick: bool) -> int:
    return 1 if quick else 7


def run(
    *,
    quick: bool,
    python: Path,
    against: str,
    only: str | None,
    mixed: bool,
    frontends: int,
    engine_threads: int,
    after_sample: AfterSample,
) -> Report:
    if not python.exists():
        raise ConfigError(f"{python} is not there: make setup-vllm")
    report = Report("vllm", QUESTION)
    report.notes.append(
        f"{'PNGs and JPEGs' if mixed else 'PNGs'}; {frontends} frontend(s) of Afferent; "
        f"{engine_threads} thread(s) for operators of each engine; "
        f"kernel.sched_autogroup_enabled {_autogroup()}"
    )
    env = {**servers.CPU.env, _THREADS: str(engine_threads)}
    device = dataclasses.replace(servers.CPU, env=env)
    best = servers.BEST if against == "best" else ()
    flags = ("--frontends", str(frontends))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = servers.make_model(Path(folder))
        sides = [
            stack.enter_context(servers.stock(against, python, model, *best, device=device)),
            stack.enter_context(servers.afferent(python, model, flags=flags, device=device)),
        ]
        pages = Pages(are_mixed=mixed)
        known = pages.fresh(_NUM_KNOWN)
        for side in sides:
            put(side, _PATH, [*pages.fresh(2), *known], 4)
        base = {side.name: side.memory() for side in sides}
        meter = BusyMeter()
        for case, c in _cases(only):
            if (case, c) == _FIRST_REPEATS:  # the misses may have evicted them
                for side in sides:
                    put(side, _PATH, known, 4)

            def one_round() -> dict[str, Load]:
                found = {}
                for side in sides:
                    is_new = case == "misses"  # noqa: B023 - called before the next case
                    number = _NUM_REQUESTS[c] if is_new else _NUM_REPEATS  # noqa: B023
                    bodies = bodies_of(pages, known, number, are_new=is_new)
                    found[side.name] = put_in_vllm(side, _PATH, bodies, c)  # noqa: B023
                    after_sample()
                return found

            rounds = quiet_rounds(
                one_round, number=_num_rounds(quick=quick), report=report, what=f"{case}, c={c}"
            )
            report.rows += [
                _row(side, case, c, [each[side.name] for each in rounds]) for side in sides
            ]
        for side in sides:
            memory = side.memory()
            report.notes.append(
                f"{side.name}: {memory.outside / 1e6:,.0f} MB outside of the worker at the end, "
                f"arena included ({base[side.name].outside / 1e6:,.0f} before), the worker "
                f"{memory.worker / 1e6:,.0f} ({base[side.name].worker / 1e6:,.0f} before)"
            )
        memories = {side.name: side.memory() for side in sides}
        report.rows += [_memory_row(name, memory) for name, memory in memories.items()]
        is_with_text = _is_wanted("text", only)
        pairs = text_pairs(sides[-1], report, after_sample) if is_with_text else []
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.rows += pairs
    report.goals = [
        *_goals(report.rows, against, _cases(only)),
        *([] if only else _memory_goals(memories, against)),
        *text_goals(pairs),
    ]
    return report


def _autogroup() -> str:
    """Return whether the kernel schedules each session of processes as a group."""
    return _AUTOGROUP.read_text().strip() if _AUTOGROUP.exists() else "is not there"


def _row(side: Side, case: str, c: int, loads: Sequence[Load]) -> Row:
    samples = {name: [float(getattr(load, name)) for load in loads] for name in MEASURED}
    return Row({"side": side.name, "case": case, "c": c}, samples)


def _memory_row(side: str, memory: servers.Memory) -> Row:
    samples = {"outside_mb": [memory.outside / 1e6], "worker_mb": [memory.worker / 1e6]}
    return Row({"side": side, "case": "memory", "c": 0}, samples)


def text_pairs(
    side: Side, report: Report, after_sample: AfterSample, *, number: int = NUM_PAIRS
) -> list[Row]:
    """Measure requests without media to the same vLLM: directly, through Afferent, and, where it
    is installed, through nginx.
    """
    body = (
        f'{{"model":"{MODEL}","max_tokens":8,"temperature":0,"ignore_eos":true,'
        '"messages":[{"role":"user","content":"What is this?"}]}'
    ).encode()
    ways = {"text, direct": side.uds, "text, through": None}

    def one_round() -> dict[str, Load]:
        found = {}
        for name, uds in ways.items():
            found[name] = put_in_vllm(side, _PATH, [body] * _NUM_TEXT, 16, uds=uds)
            after_sample()
        return found

    with ExitStack() as stack:
        if shutil.which("nginx"):
            ways["text, nginx"] = stack.enter_context(servers.nginx(side.uds))
        rounds = quiet_rounds(one_round, number=number, report=report, what="text")
    return [_row(side, name, 16, [each[name] for each in rounds]) for name in ways]


def _find(rows: Sequence[Row], side: str, case: str, c: int) -> Row:
    wanted: dict[str, Any] = {"side": side, "case": case, "c": c}
    return next(row for row in rows if row.keys == wanted)


def _goals(rows: Sequence[Row], other: str, cases: Sequence[tuple[str, int]]) -> Iterator[Goal]:
    for case, c in cases:
        ours, theirs = _find(rows, "afferent", case, c), _find(rows, other, case, c)
        most = 0.45 if case == "misses" else 0.35
        ratio = ours.median("cpu_ms") / theirs.median("cpu_ms")
        yield Goal(f"{case}, c={c}: cpu_ms / {other}'s <= {most:g}", ratio <= most, ratio)
        if case == "repeats":
            ratio = ours.median("requests_per_s") / theirs.median("requests_per_s")
            yield Goal(f"repeats, c={c}: requests_per_s / {other}'s >= 2", ratio >= 2, ratio)
        elif c == 1:
            more = ours.median("p50_ms") - theirs.median("p50_ms")
            yield Goal(f"misses, c=1: p50_ms - {other}'s <= 5", more <= 5, more)


def _memory_goals(memories: dict[str, servers.Memory], other: str) -> Iterator[Goal]:
    ours, theirs = memories["afferent"], memories[other]
    ratio = ours.outside / theirs.outside
    yield Goal(f"memory outside of the worker / {other}'s <= 0.6", ratio <= 0.6, ratio)
    ratio = ours.worker / theirs.worker
    yield Goal(f"the worker's memory / {other}'s <= 1.05", ratio <= 1.05, ratio)


def text_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    if not rows:
        return
    direct, through, *control = rows
    ratio = _ratio(through, direct)
    yield Goal("text: requests_per_s through / direct >= 0.93", ratio >= 0.93, ratio)
    for nginx in control:
        ratio = _ratio(through, nginx)
        yield Goal("text: requests_per_s through / nginx's >= 0.93", ratio >= 0.93, ratio)
    more = through.median("cpu_ms") - direct.median("cpu_ms")
    yield Goal("text: cpu_ms through - direct <= 1", more <= 1, more)


def _ratio(ours: Row, theirs: Row) -> float:
    """Return the median ratio of requests a second, of samples of the same round."""
    pairs = zip(ours.samples["requests_per_s"], theirs.samples["requests_per_s"], strict=True)
    return statistics.median(one / other for one, other in pairs)
