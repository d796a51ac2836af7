"""Run a benchmark, print its table, and write its record: ``make bench ARGS=NAME``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from afferent.errors import AfferentError
from benchmarks import (
    alloc,
    attack,
    batch_job,
    before,
    body,
    churn,
    codec,
    conversation,
    document,
    early,
    feature_batch,
    fleet,
    forms,
    gate,
    gateway,
    gateway_memory,
    gpu,
    handoff,
    images,
    kernels,
    live,
    node,
    placement,
    preprocess,
    probes,
    ray_serve,
    rollout_nodes,
    rollouts,
    store,
    tier,
    window,
)
from benchmarks.peers import offline, render, router, vllm, vllm_gpu
from benchmarks.record import Report, Row, figure, machine, named, spread, versions

BENCHMARKS: dict[str, ModuleType] = {
    "alloc": alloc,
    "attack": attack,
    "batch_job": batch_job,
    "before": before,
    "body": body,
    "churn": churn,
    "codec": codec,
    "conversation": conversation,
    "document": document,
    "early": early,
    "feature_batch": feature_batch,
    "fleet": fleet,
    "forms": forms,
    "gate": gate,
    "gateway": gateway,
    "gateway_memory": gateway_memory,
    "gpu": gpu,
    "handoff": handoff,
    "images": images,
    "kernels": kernels,
    "live": live,
    "node": node,
    "offline": offline,
    "placement": placement,
    "preprocess": preprocess,
    "probes": probes,
    "ray_serve": ray_serve,
    "render": render,
    "rollout_nodes": rollout_nodes,
    "rollouts": rollouts,
    "router": router,
    "store": store,
    "tier": tier,
    "vllm": vllm,
    "vllm_gpu": vllm_gpu,
    "window": window,
}


def main(arguments: Sequence[str]) -> int:
    args = vars(_parser().parse_args(arguments))
    name, json_file = args.pop("name"), args.pop("json")
    module = BENCHMARKS[name]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 210)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    try:
        with progress:
            task = progress.add_task(f"bench {name}", total=module.num_steps(**args))
            report = module.run(**args, after_sample=lambda: progress.advance(task))
    except AfferentError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    _print(report, module.COLUMNS, console)
    if json_file is not None:
        json_file.write_bytes(report.as_json())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description="Measure a part of Afferent beside a control and a floor, in one run.",
    )
    benchmarks = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in BENCHMARKS.items():
        one = benchmarks.add_parser(name, help=module.QUESTION, description=module.__doc__)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        one.add_argument("--quick", action="store_true", help="fewer samples; at most 45 seconds")
        one.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
        if hasattr(module, "add_arguments"):  # options of this benchmark alone
            module.add_arguments(one)
    return parser


def _print(report: Report, columns: Sequence[str], console: Console) -> None:
    console.print(f"\n[bold]{report.question}[/]")
    console.print(
        f"{named(machine())}, Python {versions()['python']}; "
        f"{report.busy_cores_elsewhere:.1f} cores busy elsewhere"
    )
    num_samples = len(next(iter(report.rows[0].samples.values())))
    console.print(f"Medians of {num_samples} samples, least..greatest below them.")
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        heading = column.replace("control_", "control_\n").replace("ray_", "ray_\n")
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(*(_cell(row, column) for column in columns))
    console.print(table)
    for note in report.notes:
        console.print(f"  [dim]{note}[/]")
    for goal in report.goals:
        word = "[green]met[/]" if goal.met else "[red]missed[/]"
        console.print(f"  {word}  {goal.what}: {figure(goal.value)}")


def _cell(row: Row, column: str) -> str:
    if column in row.samples:
        return f"{figure(row.median(column))}\n[dim]{spread(row.samples[column])}[/]"
    value = row.keys.get(column)
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
