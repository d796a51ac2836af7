"""Ray Serve behind Afferent: is a router by items better than Ray's, and a policy by waiting time?

Three parts, each with a real Ray Serve on this machine:

- *hits*: conversations about Zipf-distributed images, as in `placement`, come through a gateway
  with ``--route-header x-session-id`` to replicas with space for 60 images. There are four
  replicas, after a third of the trace eight, and after two thirds six. The sides are Ray's default
  (the less loaded of two), Ray's ``ConsistentHashRouter``, and a router that knows each replica's
  images (Ray's routing statistics, twice a second).
- *scaling*: requests of one to sixteen images come to replicas that work on one at a time; the rate
  is low, five times as high, and low again. Ray scales by the number of unanswered requests, or by
  the wait of a next request, which replicas predict from the bytes of bodies. A file has 300 KB, by
  a lognormal distribution (sigma 0.5), and takes 50 ms. Three targets of each policy are compared
  by the seconds of replicas that they cost.
- *bodies*: processor time of Ray's proxy and replica for bodies of 5 MB and of 200 bytes, less that
  of the same time without requests.

Expected before the measurement: hits by Ray's router 0.97 of those by items, and 0.6 by default;
with as many seconds of replicas, p95 by waiting time 0.9 of that by requests; 20 ms for 5 MB.

It needs Ray: ``make bench-ray NAME=ray_serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import httpx2 as httpx
import psutil

from afferent.errors import ConfigError
from benchmarks.gateway import afferent
from benchmarks.peers import ray_store
from benchmarks.placement import HEADER, Gateway, replay, trace_of
from benchmarks.record import BusyMeter, Report, Row
from tests.ports import free_pair
from tests.server import wait_until

QUESTION = "Ray Serve behind Afferent: what does a router or a policy of our own gain?"
COLUMNS = ("part", "side", "hits", "p95_s", "replica_s", "cpu_ms")
AfterSample = Callable[[], None]

_PARTS: Final = ("hits", "scaling", "bodies")
_RAYS = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_BY_WAIT = "benchmarks.controls.ray_replicas:ByWait"
_BY_SCHEDULE = "benchmarks.controls.ray_replicas:BySchedule"
_OURS = "benchmarks.controls.ray_replicas:ByItems"
_ROUTERS: Final = {"default": None, "by session": _RAYS, "by items": _OURS}
_NUM_REPLICAS: Final = (4, 8, 6)
_NUM_CONVERSATIONS, _NUM_QUICK = 600, 225
_CONVERSATIONS_PER_S = 15.0
_NUM_TRACES: Final = 3
_START_S: Final = 15.0
"""Time for the replicas to start, before a trace."""
_MOST_ONGOING: Final = 16

_POLICIES: Final[dict[str, tuple[str | None, dict[str, Any]]]] = {
    **{f"requests {each}": (None, {"target_ongoing_requests": each}) for each in (1, 2, 4)},
    **{f"predicted wait {each} s": (_BY_WAIT, {"target_s": each}) for each in (0.5, 1.0, 2.0)},
}
_FILE_NBYTES: Final = 300_000
_PHASES: Final = ((3.0, 5.0), (14.0, 25.0), (3.0, 20.0))
"""Requests a second, and seconds."""
_QUICK_PHASES: Final = ((3.0, 3.0), (14.0, 6.0), (3.0, 6.0))
_IMAGES: Final = (1, 1, 1, 2, 4, 16)
_MOST_REPLICAS: Final = 8
_NUM_ROUNDS: Final = 4

_BODIES: Final = {"5 MB": 5_000_000, "200 bytes": 200}
_NUM_BODIES, _QUICK_NUM_BODIES = 40, 10
_IDLE_S: Final = 10.0
"""Time for which Ray's processes are measured without requests, which is subtracted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))


def num_steps(*, quick: bool, parts: Sequence[str]) -> int:
    numbers = {
        "hits": len(_ROUTERS) * (1 if quick else _NUM_TRACES),
        "scaling": len(_POLICIES) * (1 if quick else _NUM_ROUNDS),
        "bodies": len(_BODIES),
    }
    return sum(numbers[part] for part in parts)


def run(*, quick: bool, after_sample: AfterSample, parts: Sequence[str]) -> Report:
    if not ray_store.is_installed():
        raise ConfigError(ray_store.MISSING)
    report, meter = Report("ray_serve", QUESTION), BusyMeter()
    with _cluster() as cluster:
        for part in parts:
            for side, samples in _MEASURES[part](cluster, quick, after_sample):
                report.rows.append(Row({"part": part, "side": side}, samples))
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


Samples = dict[str, list[float]]


class _Cluster:
    """A Ray Serve, with one application at a time."""

    def __init__(self, serve: Any, url: str) -> None:
        self._serve, self.url = serve, url
        self._number = 0
        self._replicas = importlib.import_module("benchmarks.controls.ray_replicas")

    def deploy(self, name: str, **options: Any) -> None:
        """Run a class of replicas, by a name of its own: a proxy keeps the router of a name."""
        self._number += 1
        kind = self._serve.deployment(
            getattr(self._replicas, name),
            name=f"{name}{self._number}",
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=30,
            **{"max_ongoing_requests": _MOST_ONGOING, **options},
        )
        self._serve.run(kind.bind(), name="app")

    def num_running(self) -> int:
        """Return the number of replicas that run."""
        return self._states().get("RUNNING", 0)

    def num_there(self) -> int:
        """Return the number of replicas that start, run or stop."""
        return sum(self._states().values())

    def _states(self) -> dict[str, int]:
        (deployment,) = self._serve.status().applications["app"].deployments.values()
        states: dict[str, int] = deployment.replica_states
        return states

    def wait_for(self, number: int) -> None:
        """Wait until so many replicas run."""
        wait_until(lambda: self.num_running() == number)

    def end(self) -> None:
        """End the application."""
        self._serve.delete("app")

    def by(self, router: str | None) -> dict[str, Any]:
        """Return the options for a router, given by its module and class."""
        if router is None:
            return {}
        config = importlib.import_module("ray.serve.config").RequestRouterConfig
        chosen = config(request_router_class=router, request_routing_stats_period_s=0.5)
        return {"request_router_config": chosen}

    def scaled(self, delay_s: float, policy: str | None, **options: Any) -> dict[str, Any]:
        """Return the options for a policy, given by its module and class, or for Ray's own.

        Args:
            delay_s: Time for which more replicas are needed before they are started; five times as
                long, fewer.
            options: Those of the policy, or of Ray's configuration.
        """
        module = importlib.import_module("ray.serve.config")
        if policy is not None:
            options = {
                "policy": module.AutoscalingPolicy(policy_function=policy, policy_kwargs=options)
            }
        timing = {"metrics_interval_s": 0.5, "look_back_period_s": 2}
        return {
            "autoscaling_config": module.AutoscalingConfig(
                min_replicas=1,
                max_replicas=_MOST_REPLICAS,
                upscale_delay_s=delay_s,
                downscale_delay_s=5 * delay_s,
                **timing,
                **options,
            )
        }


@contextmanager
def _cluster() -> Iterator[_Cluster]:
    ray = importlib.import_module("ray")
    serve = importlib.import_module("ray.serve")
    port = free_pair("127.0.0.1")
    ray.init(num_cpus=8, logging_level="error", log_to_driver=False, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield _Cluster(serve, f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


# Hits


def _hits(
    cluster: _Cluster, quick: bool, after_sample: AfterSample
) -> Iterator[tuple[str, Samples]]:
    number = _NUM_QUICK if quick else _NUM_CONVERSATIONS
    traces = [
        trace_of(seed, number, conversations_per_s=_CONVERSATIONS_PER_S, num_restarts=0)
        for seed in range(1 if quick else _NUM_TRACES)
    ]
    for side, router in _ROUTERS.items():
        found: Samples = {"hits": [], "p95_s": []}
        for trace in traces:
            with afferent([cluster.url], "--route-header", HEADER) as gateway:
                begin_s, part_s = time.time() + _START_S, trace[-1].at_s / len(_NUM_REPLICAS)
                numbers = [(begin_s + nth * part_s, num) for nth, num in enumerate(_NUM_REPLICAS)]
                numbers[0] = (0.0, _NUM_REPLICAS[0])
                scaled = cluster.scaled(0.0, _BY_SCHEDULE, numbers=numbers)
                cluster.deploy("CachingReplica", **cluster.by(router), **scaled)
                cluster.wait_for(_NUM_REPLICAS[0])
                time.sleep(max(0.0, begin_s - time.time()))
                hits, took_s = asyncio.run(replay(trace, Gateway(gateway.url)))
                num_running = cluster.num_running()
            cluster.end()
            if num_running != _NUM_REPLICAS[-1]:
                raise ConfigError(f"Ray has {num_running} replicas at the end of the trace")
            found["hits"].append(hits)
            found["p95_s"].append(_p95(took_s))
            after_sample()
        yield side, found
    seen = [len({turn.item for turn in trace}) / len(trace) for trace in traces]
    yield "each image but its first time", {"hits": [1 - each for each in seen]}


# Scaling


def _scaling(
    cluster: _Cluster, quick: bool, after_sample: AfterSample
) -> Iterator[tuple[str, Samples]]:
    phases = _QUICK_PHASES if quick else _PHASES
    found: dict[str, Samples] = {side: {"p95_s": [], "replica_s": []} for side in _POLICIES}
    for seed in range(1 if quick else _NUM_ROUNDS):
        for side, (policy, options) in _POLICIES.items():
            # All requests are in a replica, where it can count them for its wait.
            scaled = cluster.scaled(1.0, policy, **options)
            cluster.deploy("BusyReplica", max_ongoing_requests=100_000, **scaled)
            cluster.wait_for(1)
            took_s, replica_s = asyncio.run(_load(cluster, phases, seed))
            cluster.end()
            found[side]["p95_s"].append(_p95(took_s))
            found[side]["replica_s"].append(replica_s)
            after_sample()
    yield from found.items()


async def _load(
    cluster: _Cluster, phases: Sequence[tuple[float, float]], seed: int
) -> tuple[list[float], float]:
    """Send requests at the rates of the phases; return their times, and the replicas' seconds."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    took_s: list[float] = []
    replica_s = 0.0

    async def ask(client: httpx.AsyncClient, images: int) -> None:
        nbytes = sum(int(_FILE_NBYTES * rng.lognormvariate(0, 0.5)) for _ in range(images))
        start_s = time.perf_counter()
        answer = await client.get(f"{cluster.url}/?images={images}&nbytes={nbytes}")
        answer.raise_for_status()
        took_s.append(time.perf_counter() - start_s)

    async def count() -> None:
        nonlocal replica_s
        while True:
            start_s = time.perf_counter()
            number = await asyncio.to_thread(cluster.num_there)
            await asyncio.sleep(0.5)
            replica_s += number * (time.perf_counter() - start_s)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        counting = asyncio.create_task(count())
        async with asyncio.TaskGroup() as group:
            begin_s = time.perf_counter()
            for rate, for_s in phases:
                end_s = begin_s + for_s
                at_s = begin_s + rng.expovariate(rate)
                while at_s < end_s:
                    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                    group.create_task(ask(client, rng.choice(_IMAGES)))
                    at_s += rng.expovariate(rate)
                await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
                begin_s = end_s
        counting.cancel()
    return took_s, replica_s


# Bodies


def _bodies(
    cluster: _Cluster, quick: bool, after_sample: AfterSample
) -> Iterator[tuple[str, Samples]]:
    number = _QUICK_NUM_BODIES if quick else _NUM_BODIES
    cluster.deploy("CachingReplica", num_replicas=1)
    begin_cpu_s = _cpu_s()
    time.sleep(_IDLE_S)
    idle = (_cpu_s() - begin_cpu_s) / _IDLE_S
    with httpx.Client(timeout=60) as client:
        for side, nbytes in _BODIES.items():
            body = b'"' + b"a" * (nbytes - 2) + b'"'
            client.post(cluster.url, content=body).raise_for_status()
            found: list[float] = []
            for _ in range(5):
                begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
                for _ in range(number):
                    client.post(cluster.url, content=body).raise_for_status()
                took_s, cpu_s = time.perf_counter() - begin_s, _cpu_s() - begin_cpu_s
                found.append(1e3 * (cpu_s - took_s * idle) / number)
            after_sample()
            yield side, {"cpu_ms": found}
    cluster.end()


def _cpu_s() -> float:
    """Return the processor time of Ray's proxy and replicas."""
    total = 0.0
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        line = " ".join(process.info["cmdline"] or ())
        if "ProxyActor" in line or "ServeReplica" in line:
            times = process.info["cpu_times"]
            total += times.user + times.system
    return total


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


_MEASURES: Final = {"hits": _hits, "scaling": _scaling, "bodies": _bodies}
