"""The simulated server of a plan."""

from __future__ import annotations

from tests.simulation import vllm
from tests.simulation.engine import Core, Rank
from tests.simulation.frontends import Frontend
from tests.simulation.plan import Plan
from tests.simulation.programs import Program
from tests.simulation.tier import Fetcher, Keeper
from tests.simulation.workers import Worker
from tests.simulation.world import World


def build(plan: Plan, *, keeps: bool = False) -> World:
    """Start all processes of a plan's server."""
    world = World(plan, keeps=keeps)
    world.add("daemon", World.start_daemon)
    if plan.ranks:
        world.add("core", Core)
    if plan.has_vllm:
        world.vllm = vllm.Vllm()
        world.add(vllm.CORE, vllm.VllmCore)
        world.add(vllm.WORKER, vllm.VllmWorker)
    for names, role in (
        (plan.ranks, Rank),
        (plan.frontends, Frontend),
        (plan.libraries, Program),
        (plan.workers, Worker),
        (plan.tiers[:1], Fetcher),
        (plan.tiers[1:], Keeper),
    ):
        for name in names:
            world.add(name, role)
    return world
