"""Runs of seeds and of plans."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from afferent.builtin.engine.core.pins import Pins
from afferent.store.daemon import main as daemon_main
from tests.collector import frozen
from tests.simulation.drawing import plan_of
from tests.simulation.engine import grids_of_stamps
from tests.simulation.oracle import Observed
from tests.simulation.plan import Plan
from tests.simulation.promptness import Promptness, followed
from tests.simulation.server import build
from tests.simulator.history import Event
from tests.simulator.substitution import simulated

MODULES = (
    "afferent.builtin.engine.core.loop",
    "afferent.builtin.engine.core.main",
    "afferent.builtin.engine.core.pins",
    "afferent.builtin.engine.core.ranks",
    "afferent.engines.remote.client",
    "afferent.engines.vllm.plugin.step_pins",
    "afferent.engines.vllm.plugin.step_reader",
    "afferent.items.acquire",
)
_COLLECT_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a seed."""

    seed: int
    violation: str
    digest: str
    num_events: int
    now_s: float
    ends: Counter[str]
    pairs: Counter[tuple[str, str]]
    events: list[Event]


@contextmanager
def stage() -> Iterator[None]:
    """Replace the modules of the product by simulated ones; seeds run in this context."""
    real, daemon_main.StoreState = daemon_main.StoreState, Observed  # type: ignore[misc]
    real_grids, Pins._grids = Pins._grids, grids_of_stamps  # type: ignore[method-assign]
    logging.disable(logging.CRITICAL)
    was_enabled = gc.isenabled()
    try:
        with frozen():
            gc.disable()  # its runs are not deterministic
            with simulated(MODULES), followed():
                yield
    finally:
        if was_enabled:
            gc.enable()
        logging.disable(logging.NOTSET)
        daemon_main.StoreState = real  # type: ignore[misc]
        Pins._grids = real_grids  # type: ignore[method-assign]


def run_plan(plan: Plan, *, keeps: bool = False) -> Result:
    """Run a plan once; the same plan always gives the same result."""
    world = build(plan, keeps=keeps)
    Observed.oracle, Promptness.current = world.oracle, world.oracle.prompt
    try:
        world.run()
        machine = world.machine
        return Result(
            seed=plan.seed,
            violation=machine.violations[0] if machine.violations else "",
            digest=machine.history.digest,
            num_events=machine.num_events,
            now_s=machine.now_s,
            ends=world.ends,
            pairs=world.pairs,
            events=machine.history.events,
        )
    finally:
        world.close()


def run_seed(seed: int, *, dropped: frozenset[int] = frozenset(), keeps: bool = False) -> Result:
    if seed % _COLLECT_EVERY == 0:
        gc.collect()
    return run_plan(plan_of(seed).without(dropped), keeps=keeps)
