"""Measure the cost of a request's images until their features exist, beside vLLM's render server.

Servers that only preprocess, with the same model, run at the same time and work in turn: ``vllm
launch render``, and Afferent with requests to ``render?features=1``. Pages are PNGs of 1275 x 1650.

Equal work comes first: vLLM gets ``mm_payload: none``, so that no answer contains features. Then
transport: without this field (``vllm, tensors``), vLLM's answer contains the features as base64,
for an engine on another host; ours contains handles to the arena. The clients discard the answers.

Afferent runs at its defaults, for hits also with two frontends, and for misses also with an arena
that has taken its memory at the start: the other arena fills in the first rounds. The lower bound
of a hit is a server that reads the request, decodes its base64, digests it, and does nothing else.
Memory is read after each measurement: private memory of the processes, and shared memory (the
arena).

The benchmark needs an environment with vLLM (``make setup-vllm``), and takes a quarter of an hour.

Expected before the measurement, from an outside study: with equal work, misses 4 times vLLM's
requests a second and hits 14 times, at a quarter and a sixteenth of its processor time. Misses with
the arena's memory taken: 4.3 and 5.3 times with one and 16 clients, and no difference with 64.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from afferent.errors import ConfigError
from benchmarks.peers import servers
from benchmarks.peers.load import Load, Pages, bodies_of, put
from benchmarks.peers.servers import Side
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, quiet_rounds
from tools import vllm_env

QUESTION = "What do images cost until their features exist, beside vLLM's render server?"
COLUMNS = ("side", "case", "c", "requests_per_s", "p50_ms", "p99_ms", "cpu_ms", "memory_mb")

_VLLM, _TENSORS, _AFFERENT, _TAKEN, _TWO, _FLOOR = SIDES = (
    *("vllm", "vllm, tensors"),
    *("afferent", "afferent, memory taken", "afferent, 2 frontends", "floor"),
)
_FEATURES = "/v1/chat/completions/render?features=1"
_PATHS: Final = {
    _VLLM: "/v1/chat/completions/render",
    _TENSORS: "/v1/chat/completions/render",
    _AFFERENT: _FEATURES,
    _TAKEN: _FEATURES,
    _TWO: _FEATURES,
    _FLOOR: "/",
}
_CASES = (
    ("misses", 1, 12),
    ("misses", 16, 48),
    ("misses", 64, 96),
    ("hits", 1, 96),
    ("hits", 16, 192),
    ("hits", 64, 192),
)
"""The cases: hits or misses, the number of clients, and the requests in a sample."""
_NUM_KNOWN = 16

AfterSample = Callable[[], None]


def _asked(case: str, c: int) -> list[str]:
    """Return the sides that take part in a case."""
    if case == "misses":
        return [_VLLM, _AFFERENT, _TAKEN, *([_TENSORS] if c == 16 else [])]
    return [_VLLM, _AFFERENT, _TWO, _FLOOR, *([_TENSORS] if c == 16 else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", type=Path, default=vllm_env.python_of(vllm_env.FOLDER), help="with vLLM"
    )


def num_steps(*, quick: bool, python: Path) -> int:
    return sum(len(_asked(case, c)) for case, c, _ in _CASES) * _num_rounds(quick=quick)


def _num_rounds(*, quick: bool) -> int:
    return 1 if quick else MIN_SAMPLES


def run(*, quick: bool, python: Path, after_sample: AfterSample) -> Report:
    if not python.exists():
        raise ConfigError(f"{python} is not there: make setup-vllm")
    report = Report("render", QUESTION)
    with tempfile.TemporaryDirectory() as folder:
        model = servers.make_model(Path(folder))
        with (
            servers.stock_render(python, model) as stock,
            servers.afferent_render(model) as afferent,
            servers.afferent_render(model, "--preallocate-arena") as taken,
            servers.afferent_render(model, "--frontends", "2") as two,
            servers.floor() as floor,
        ):
            found = (stock, stock, afferent, taken, two, floor)
            sides, pages = dict(zip(SIDES, found, strict=True)), Pages()
            for name in SIDES:
                _put(sides, name, pages.fresh(4), 4)
            base = {name: _whole_mb(side) for name, side in sides.items()}
            meter, known = BusyMeter(), pages.fresh(_NUM_KNOWN)
            for case, c, number in _CASES:
                asked = _asked(case, c)
                if case == "hits":  # the misses may have evicted them
                    for name in asked:
                        _put(sides, name, known, 4)

                def one_round() -> dict[str, tuple[Load, float]]:
                    found = {}
                    for name in asked:  # noqa: B023 - called before the next case
                        is_new = case == "misses"  # noqa: B023
                        bodies = bodies_of(pages, known, number, are_new=is_new)  # noqa: B023
                        load = _put(sides, name, bodies, c)  # noqa: B023
                        found[name] = load, _whole_mb(sides[name])
                        after_sample()
                    return found

                rounds = quiet_rounds(
                    one_round,
                    number=_num_rounds(quick=quick),
                    report=report,
                    what=f"{case}, c={c}",
                )
                report.rows += [
                    _row(name, case, c, [each[name] for each in rounds]) for name in asked
                ]
            report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.notes += [
        f"{name}: {base[name]:,.0f} MB before, shared memory included"
        for name in (_VLLM, _AFFERENT, _TAKEN, _TWO)
    ]
    report.goals = list(_goals(report.rows))
    return report


def _put(sides: dict[str, Side], name: str, bodies: Sequence[bytes], c: int) -> Load:
    if name == _VLLM:
        bodies = [body[:-1] + b',"mm_payload":"none"}' for body in bodies]
    return put(sides[name], _PATHS[name], bodies, c)


def _whole_mb(side: Side) -> float:
    parts = side.memory_parts()
    return (parts.private + parts.shared) / 1e6


def _row(name: str, case: str, c: int, rounds: Sequence[tuple[Load, float]]) -> Row:
    """Return a row with the results of all rounds, and the server's memory after each, in MB."""
    names = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms")
    samples = {each: [float(getattr(load, each)) for load, _ in rounds] for each in names}
    samples["memory_mb"] = [memory_mb for _, memory_mb in rounds]
    return Row({"side": name, "case": case, "c": c}, samples)


def _goals(rows: Sequence[Row]) -> Iterator[Goal]:
    by_key = {(row.keys["side"], row.keys["case"], row.keys["c"]): row for row in rows}
    has_wide_vectors = "avx512f" in Path("/proc/cpuinfo").read_text()
    for case, c, _ in _CASES:
        theirs = by_key[_VLLM, case, c]
        names = (_AFFERENT, _TAKEN) if case == "misses" else (_AFFERENT, _TWO)
        least = 12 if case == "hits" else 5 if has_wide_vectors else 4
        for name in names:
            ours = by_key[name, case, c]
            ratio = _ratio(ours, theirs, "requests_per_s")
            what = f"{case}, c={c}: requests_per_s of {name} / vllm's >= {least}"
            yield Goal(what, ratio >= least, ratio)
        if case == "hits":
            ratio = _ratio(theirs, by_key[_AFFERENT, case, c], "cpu_ms")
            yield Goal(f"{case}, c={c}: vllm's cpu_ms / afferent's >= 20", ratio >= 20, ratio)
    hit = by_key[_AFFERENT, "hits", 16]
    value = hit.median("cpu_ms")
    yield Goal("hits, c=16: cpu_ms <= 1.2", value <= 1.2, value)
    value = hit.median("p99_ms") / hit.median("p50_ms")
    yield Goal("hits, c=16: p99_ms / p50_ms <= 2", value <= 2, value)
    memory = {name: max(_memory(rows, name)) for name in (_VLLM, _TENSORS, _AFFERENT)}
    ratio = memory[_AFFERENT] / max(memory[_VLLM], memory[_TENSORS])
    yield Goal("memory, all of it / vllm's < 1", ratio < 1, ratio)


def _ratio(above: Row, below: Row, name: str) -> float:
    """Return the median ratio of neighbouring turns."""
    pairs = zip(above.samples[name], below.samples[name], strict=True)
    return statistics.median(one / other for one, other in pairs)


def _memory(rows: Sequence[Row], side: str) -> list[float]:
    return [most for row in rows if row.keys["side"] == side for most in row.samples["memory_mb"]]
