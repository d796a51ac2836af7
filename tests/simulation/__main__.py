"""Seeds of the simulation: `make simulate ARGS="--seeds 100000 --from 7"`.

For a seed that fails, print the command that replays it, without unneeded parts of its plan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from tests.simulation.ablations import ABLATIONS
from tests.simulation.batches import BATCH, applied, results
from tests.simulation.drawing import plan_of
from tests.simulation.plan import NOTHING
from tests.simulation.running import Result, run_seed, stage
from tests.simulation.shrinking import shrink
from tests.simulation.wording import words
from tests.simulator.history import diagram

_RARE = 100


@dataclass(slots=True)
class Tally:
    """Statistics of the seeds so far; saved in a file, they let a later run continue."""

    start: int
    next_seed: int
    seconds: float = 0.0
    num_events: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        self.next_seed = result.seed + 1
        self.num_events += result.num_events
        self.ends += result.ends
        self.pairs += Counter(
            {f"{state} / {fault}": n for (state, fault), n in result.pairs.items()}
        )
        if result.violation:
            self.failed[result.seed] = result.violation

    def save(self, path: Path) -> None:
        described = {name: getattr(self, name) for name in self.__slots__}
        beside = path.with_name(path.name + ".part")  # the run may be killed at any time
        beside.write_text(json.dumps(described, indent=1))
        beside.replace(path)

    @classmethod
    def load(cls, path: Path, start: int) -> Tally:
        if not path.exists():
            return cls(start, start)
        found = json.loads(path.read_text())
        found["ends"], found["pairs"] = Counter(found["ends"]), Counter(found["pairs"])
        found["failed"] = {int(seed): why for seed, why in found["failed"].items()}
        return cls(**found)


def _seeds(args: argparse.Namespace) -> int:
    """Run many seeds, and return the exit status."""
    tally = Tally.load(args.state, args.start) if args.state else Tally(args.start, args.start)
    end, before_s, start_s = tally.start + args.seeds, tally.seconds, time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), "{task.description}", TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=args.seeds, completed=tally.next_seed - tally.start)
        for result in results(tally.next_seed, end, args.jobs, args.ablation):
            tally.add(result)
            tally.seconds = before_s + time.monotonic() - start_s
            progress.update(bar, advance=1, description=f"{len(tally.failed)} failed")
            if args.state and result.seed % BATCH == 0:
                tally.save(args.state)
            if result.violation and (args.ablation or len(tally.failed) >= args.failures):
                break
    if args.state:
        tally.save(args.state)
    _say(tally)
    for seed in tally.failed:
        _explain(seed, args.ablation)
    return 1 if tally.failed else 0


def _say(tally: Tally) -> None:
    count = tally.next_seed - tally.start
    rate = count / max(tally.seconds, 1e-9)
    print(f"{count} seeds from {tally.start} in {tally.seconds:.0f} s, {rate:.1f} a second,")
    print(f"{tally.num_events / max(count, 1):.0f} events each; {len(tally.failed)} failed")
    print("requests: " + ", ".join(f"{n} {what}" for what, n in tally.ends.most_common()))
    rare = {pair: n for pair, n in sorted(tally.pairs.items()) if n < _RARE}
    print(
        f"{len(tally.pairs)} pairs of a state and a fault, {len(rare)} of them reached less than "
        f"{_RARE} times" + (": " if rare else "")
    )
    for pair, number in rare.items():
        print(f"  {pair}: {number}")


def _explain(seed: int, ablation: str | None) -> None:
    """Shrink a failing seed, and print the command that replays it."""
    with stage(), applied(ablation):
        violation = run_seed(seed).violation
        dropped = shrink(seed, plan_of(seed).elements, violation)
        short = run_seed(seed, dropped=dropped).violation
    more = f" --drop {','.join(map(str, sorted(dropped)))}" if dropped else ""
    more += f" --ablation {ablation}" if ablation else ""
    print(f'seed {seed}: {short}\n  make simulate ARGS="--replay {seed}{more}"')


def _replay(args: argparse.Namespace) -> int:
    dropped = frozenset(int(each) for each in args.drop.split(",") if each)
    with stage(), applied(args.ablation):
        result = run_seed(args.replay, dropped=dropped, keeps=True)
    plan = plan_of(args.replay).without(dropped)
    for each in (*plan.tasks, *plan.faults):
        if each.what != NOTHING:
            print(each)
    print(diagram(result.events, read=words))
    print(result.violation or "nothing went wrong that should not", f"(history {result.digest})")
    return 1 if result.violation else 0


def _all_ablations(args: argparse.Namespace) -> int:
    """Switch every safeguard off, one after the other: some seed has to fail without it."""
    unmissed = []
    end = args.start + args.seeds
    for each in ABLATIONS:
        found = results(args.start, end, args.jobs, each.name)
        missed = next((result for result in found if result.violation), None)
        if missed is None:
            unmissed.append(each.name)
            print(f"{each.name:20} not missed by {args.seeds} seeds", flush=True)
        else:
            print(f"{each.name:20} seed {missed.seed:6} {missed.violation[:90]}", flush=True)
    print(f"{len(ABLATIONS) - len(unmissed)} of {len(ABLATIONS)} safeguards are missed")
    return 1 if unmissed else 0


def main() -> int:
    names = [each.name for each in ABLATIONS]
    parser = argparse.ArgumentParser(description=__doc__, prog="make simulate")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--failures", type=int, default=3, help="end after so many")
    parser.add_argument("--state", type=Path, help="a file to write down how far it is, and go on")
    parser.add_argument("--replay", type=int, metavar="SEED", help="draw what happens")
    parser.add_argument("--drop", default="", help="elements of the plan to leave out, by number")
    parser.add_argument("--ablation", choices=names, help="switch a safeguard off")
    parser.add_argument("--ablations", action="store_true", help="all of them, one by one")
    args = parser.parse_args()
    if args.replay is not None:
        return _replay(args)
    return _all_ablations(args) if args.ablations else _seeds(args)


if __name__ == "__main__":
    sys.exit(main())
