"""Measure the benchmark records again: ``make records``, the last step before a release.

    python -m tools.remeasure                  # those measured with other code, short ones first
    python -m tools.remeasure --only render vllm
    python -m tools.remeasure --list

Nothing else should run meanwhile. Each record is replaced when its benchmark has ended, so an
interrupted run continues where it stopped. Then ``python -m tools.records_page --write`` and
``python -m tools.selected_results --write`` write the pages with their figures.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.record import code
from tools.measured_code import changed
from tools.records_page import FOLDER

_ROOT = Path(__file__).parents[1]
_OWN, _RAY = ".venv", ".venv-ray"
"""The second has torchvision, too, with which `transformers` is faster."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Command of a record.

    Attributes:
        record: Name of its file, without date and suffix.
        arguments: Of ``python -m benchmarks.run``, words of one line.
        minutes: About how long it takes on two cores.
        environment: Folder of the environment that runs it.
    """

    record: str
    arguments: str
    minutes: float
    environment: str = _OWN

    @property
    def path(self) -> Path:
        return FOLDER / f"2026-11-{self.record}.json"


MEASUREMENTS: Final = (
    Measurement("alloc", "alloc", 1),
    Measurement("churn", "churn", 1),
    Measurement("kernels", "kernels", 1),
    Measurement("body", "body", 1),
    Measurement("images", "images", 1),
    Measurement("gateway", "gateway", 1),
    Measurement("window", "window", 1),
    Measurement("node", "node", 1),
    Measurement("codec", "codec", 2),
    Measurement("handoff", "handoff", 2),
    Measurement("store", "store", 2),
    Measurement("probes", "probes", 3),
    Measurement("render", "render", 4),
    Measurement("router-render", "router", 4),
    Measurement("preprocess", "preprocess", 3, _RAY),
    Measurement("feature-batch", "feature_batch", 1, _RAY),
    Measurement("early", "early", 3),
    Measurement("document", "document", 3),
    Measurement("conversation", "conversation", 3),
    Measurement("forms", "forms", 3),
    Measurement("fleet", "fleet", 3),
    Measurement("tier", "tier --quick", 3),
    Measurement("placement", "placement", 11),
    Measurement("offline", "offline", 8),
    Measurement("gateway-memory", "gateway_memory", 5),
    Measurement("live", "live --sides whole window --numbers 100 1000 7200", 1),
    Measurement("live-many", "live --sides whole --numbers 1000 8000 32000", 1),
    Measurement("live-request", "live --sides request --numbers 1000 8000 32000", 1),
    Measurement("live-resume", "live --sides resume --numbers 300 7200", 1),
    Measurement("live-real", "live --sides real", 12),
    Measurement("vllm", "vllm", 11),
    Measurement("vllm-best", "vllm --against best", 11),
    Measurement("vllm-text", "vllm --only text", 2),
    Measurement("vllm-text-one-thread", "vllm --only text --engine-threads 1", 2),
    Measurement("vllm-repeats", "vllm --only repeats", 5),
    Measurement("vllm-mixed", "vllm --mixed --only misses", 6),
    Measurement("vllm-frontends", "vllm --frontends 2 --only misses", 6),
    Measurement(
        *("gate-128", "gate --regimes producer --gates off 2 4 bytes --runs 7 --requests 128", 4)
    ),
    Measurement("rollouts", "rollouts", 5, _RAY),
    Measurement("rollout-nodes", "rollout_nodes", 1, _RAY),
    Measurement("tier-ray", "tier --quick", 2, _RAY),
    Measurement("ray-serve", "ray_serve", 30, _RAY),
    Measurement("batch-job", "batch_job", 37, _RAY),
    Measurement("gate", "gate", 33),
    Measurement("attack-all", "attack --kind 'all of these'", 23),
    Measurement(
        "attack-answers",
        "attack --rounds 3 --requests 100 --kind '8 answers, read' "
        "--kind '8 answers, unread' --kind '8 photos'",
        29,
    ),
    Measurement(
        "attack-others",
        "attack --rounds 3 --requests 100 --kind '128 images' --kind 'schema bombs' "
        "--kind 'large PNGs' --kind leavers --kind 'scanned JPEGs' --kind 'announced bodies' "
        "--kind 'unread streams' --kind 'dripping URLs' --kind 'redirect loops'",
        60,
    ),
    Measurement(
        "attack-close",
        "attack --rounds 7 --requests 100 --kind 'large PNGs' --kind 'schema bombs' "
        "--kind 'dripping URLs'",
        65,
    ),
)

NOT_AGAIN: Final = {
    "attack": "an earlier version of the benchmark, beside which its note shows the present one",
    "before": "a comparison of two older versions",
    "node-huge-pages": "needs a setting of the kernel: see its note",
    "vllm-one-group": "needs a setting of the kernel: see its note",
    "vllm-text-one-group": "needs a setting of the kernel: see its note",
    "vllm-again": "an earlier version, beside which its note shows the present one",
    "gpu": "needs a GPU",
    "gpu-h100": "needs a GPU",
    "vllm-gpu": "needs a GPU",
    "vllm-gpu-eager": "needs a GPU",
    "vllm-gpu-queue": "needs a GPU",
}
"""Records that this program does not measure, with the reason."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="remeasure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [each.record for each in MEASUREMENTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="RECORD", help="only these")
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    given = parser.parse_args(arguments)
    now = code()
    chosen = [
        each
        for each in sorted(MEASUREMENTS, key=lambda each: each.minutes)
        if (each.record in given.only if given.only else _is_old(each, now))
    ]
    print(f"{len(chosen)} records, some {sum(each.minutes for each in chosen):.0f} minutes")
    if given.list:
        for each in chosen:
            print(f"{each.record:18} {each.minutes:4.0f} min  benchmarks.run {each.arguments}")
        return 0
    failed = [each.record for each in chosen if not _measure(each)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _is_old(measurement: Measurement, now: dict[str, str]) -> bool:
    if not measurement.path.exists():
        return True
    return changed(msgspec.json.decode(measurement.path.read_bytes()), now) != []


def _measure(measurement: Measurement) -> bool:
    """Run a benchmark; return whether it has written its record."""
    print(f"==> {measurement.record} ({measurement.minutes:.0f} min)", flush=True)
    python = _ROOT / measurement.environment / "bin" / "python"
    new = measurement.path.with_suffix(".new")
    words = [*shlex.split(measurement.arguments), "--json", str(new)]
    start_s = time.monotonic()
    done = subprocess.run([python, "-m", "benchmarks.run", *words], cwd=_ROOT, check=False)
    if done.returncode == 0 and new.exists():
        new.replace(measurement.path)
    new.unlink(missing_ok=True)
    print(f"    {(time.monotonic() - start_s) / 60:.1f} min, exit {done.returncode}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
