"""Hits of conversations about images on eight replicas, by what places their requests.

A trace has conversations of one to four turns, each about one image; the images are
Zipf-distributed, and a popular one comes in many conversations. Each replica has space for 60
images, and three times one of them restarts and forgets all. The same traces are sent through all
sides:

- *by events* and *by digest*: Afferent as a gateway, with the replicas' item events or without;
- *header*: Afferent's ``--route-header`` and HAProxy, which hashes it;
- *vllm_router* and *smg*: vllm-router and SMG, with their policies for prefix caches
  (``cache_aware``);
- *guess*: a router that keeps the images that it sent to each replica, in an LRU cache that counts
  2 MiB for each, as replicas with twice as large images would have it;
- *round robin*;
- *oracle*: it knows the content of each replica at each moment, and takes the least loaded one.

A sample is one trace: the part of its requests whose replica has the image. Routers that are not
installed are left out.

Expected before the measurement: by events 0.98 of the oracle's hits, by digest and by header 0.95;
vllm-router and SMG 0.6, as they keep a conversation together, and not an image; round robin 0.4.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import httpx2 as httpx
import numpy as np
from PIL import Image

from benchmarks.children import command
from benchmarks.controls.caching_replicas import CAPACITY, ITEM_NBYTES
from benchmarks.gateway import afferent, haproxy, installed_baselines, router
from benchmarks.record import BusyMeter, Goal, Report, Row
from tests.images import encoded
from tests.ports import free_pair
from tests.server import data_url, image_part

QUESTION = "How often does a request reach a replica that has its image?"
COLUMNS = ("side", "hits", "of_oracle", "p50_ms")
_SIDES: Final = (
    *("oracle", "by events", "by digest", "header"),
    *("vllm_router", "smg", "guess", "round robin"),
)

_HOSTS: Final = tuple(f"127.0.0.{number}" for number in range(2, 10))
_NUM_ITEMS, _ZIPF = 2_000, 1.1
_NUM_CONVERSATIONS, _NUM_QUICK = 1_000, 60
_MOST_TURNS, _PAUSE_S = 4, (0.5, 2.0)
_CONVERSATIONS_PER_S = 50.0
_NUM_RESTARTS = 3
_NUM_TRACES = 3
_SETTLE_S = 0.5
_GUESSED_NBYTES = 2 << 20
HEADER = "x-session-id"
_BY_HEADER = f"hdr({HEADER})\n  hash-type consistent"

AfterSample = Callable[[], None]


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """Request of a trace, at a time; ``restarts`` names a replica that restarts before it."""

    at_s: float
    conversation: int
    number: int
    item: int
    restarts: int | None = None


@dataclass(slots=True)
class _Result:
    hits: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)


class Gateway:
    """A gateway that chooses the replica."""

    def __init__(self, url: str) -> None:
        self._url = url

    def choose(self, item: int) -> tuple[str, int]:
        """Return the URL for a request about an item, and the number of the replica, if any."""
        return self._url, 0

    def ended(self, index: int) -> None:
        """Note the end of a request."""

    def restarted(self, index: int) -> None:
        """Note that a replica has restarted."""


class _RoundRobin(Gateway):
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._next = itertools.cycle(range(len(urls)))

    def choose(self, item: int) -> tuple[str, int]:
        index = next(self._next)
        return self._urls[index], index


class _Knowing(Gateway):
    """A router that keeps an LRU cache of the items that it sent to each replica."""

    def __init__(self, urls: Sequence[str], *, capacity: int, knows_restarts: bool) -> None:
        self._urls, self._capacity, self._knows_restarts = urls, capacity, knows_restarts
        self._items = [OrderedDict[int, None]() for _ in urls]
        self._num_running = [0] * len(urls)

    def choose(self, item: int) -> tuple[str, int]:
        every = range(len(self._urls))
        having = [index for index in every if item in self._items[index]]
        index = min(having or every, key=lambda each: self._num_running[each])
        items = self._items[index]
        items[item] = None
        items.move_to_end(item)
        if len(items) > self._capacity:
            items.popitem(last=False)
        self._num_running[index] += 1
        return self._urls[index], index

    def ended(self, index: int) -> None:
        self._num_running[index] -= 1

    def restarted(self, index: int) -> None:
        if self._knows_restarts:
            self._items[index].clear()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sides", nargs="+", choices=_SIDES[1:], default=list(_SIDES[1:]))


def num_steps(*, quick: bool, sides: Sequence[str]) -> int:
    return len(_installed(sides)) * (1 if quick else _NUM_TRACES)


def _installed(sides: Sequence[str]) -> list[str]:
    """Return the oracle, and those of these sides whose programs are installed."""
    baselines = installed_baselines()
    needed = {"header": "haproxy", "vllm_router": "vllm_router", "smg": "smg"}
    return [_SIDES[0], *(side for side in sides if side not in needed or needed[side] in baselines)]


def run(*, quick: bool, after_sample: AfterSample, sides: Sequence[str]) -> Report:
    report, meter = Report("placement", QUESTION), BusyMeter()
    number = _NUM_QUICK if quick else _NUM_CONVERSATIONS
    traces = [trace_of(seed, number) for seed in range(1 if quick else _NUM_TRACES)]
    results = {name: _Result() for name in _installed(sides)}
    with _replicas() as (urls, events_port):
        for name, result in results.items():
            with contextlib.ExitStack() as stack:
                way = _way(name, urls, events_port, stack)
                for trace in traces:
                    hits, took_s = asyncio.run(replay(trace, way(), urls))
                    result.hits.append(hits)
                    result.p50_ms.append(1e3 * statistics.median(took_s))
                    after_sample()
    oracle = results["oracle"].hits
    for name, result in results.items():
        ratios = [one / other for one, other in zip(result.hits, oracle, strict=True)]
        samples = {"hits": result.hits, "of_oracle": ratios, "p50_ms": result.p50_ms}
        report.rows.append(Row({"side": name}, samples))
        if name == "by events":
            goal = "by events: at least 0.98 of the oracle's hits"
            report.goals.append(Goal(goal, min(ratios) >= 0.98, min(ratios)))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _way(
    name: str, urls: Sequence[str], events_port: int, stack: contextlib.ExitStack
) -> Callable[[], Gateway]:
    """Start what a side needs; return what makes its router anew for each trace."""
    if name == "oracle":
        return partial(_Knowing, urls, capacity=CAPACITY, knows_restarts=True)
    if name == "guess":
        capacity = CAPACITY * ITEM_NBYTES // _GUESSED_NBYTES
        return partial(_Knowing, urls, capacity=capacity, knows_restarts=False)
    if name == "round robin":
        return partial(_RoundRobin, urls)
    if name == "by events":
        started = afferent(urls, "--engine-events-port", str(events_port))
    elif name == "by digest":
        started = afferent(urls)
    elif name == "header":
        behind = stack.enter_context(haproxy(urls, _BY_HEADER))
        started = afferent([behind.url], "--route-header", HEADER)
    else:
        started = router(name, urls)
    return partial(Gateway, stack.enter_context(started).url)


@contextlib.contextmanager
def _replicas() -> Iterator[tuple[list[str], int]]:
    """Run the replicas; yield their URLs, and the port of their events."""
    port, events_port = free_pair(*_HOSTS), free_pair(*_HOSTS)
    module = "benchmarks.controls.caching_replicas"
    line = [sys.executable, "-m", module, str(port), str(events_port), *_HOSTS]
    with command(line, stdout=subprocess.PIPE) as popen:
        if next(iter(popen.stdout or ()), b"") != b"ready\n":
            raise RuntimeError("the replicas did not start; their log is above")
        yield [f"http://{host}:{port}" for host in _HOSTS], events_port


def trace_of(
    seed: int,
    num_conversations: int,
    *,
    conversations_per_s: float = _CONVERSATIONS_PER_S,
    num_restarts: int = _NUM_RESTARTS,
) -> list[Turn]:
    """Return the turns of all conversations, in order."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(_NUM_ITEMS)]
    at_s, turns = 0.0, list[Turn]()
    for index in range(num_conversations):
        at_s += rng.expovariate(conversations_per_s)
        (item,), turn_s = rng.choices(range(_NUM_ITEMS), weights), at_s
        for number in range(rng.randint(1, _MOST_TURNS)):
            turns.append(Turn(turn_s, seed * num_conversations + index, number, item))
            turn_s += rng.uniform(*_PAUSE_S)
    turns.sort()
    for nth in range(1, num_restarts + 1):
        at = nth * len(turns) // (num_restarts + 1)
        turns[at] = replace(turns[at], restarts=rng.randrange(len(_HOSTS)))
    return turns


async def replay(
    trace: Sequence[Turn], way: Gateway, urls: Sequence[str] = ()
) -> tuple[float, list[float]]:
    """Send the requests of a trace at their times; return the part of hits, and the times.

    Args:
        urls: Replicas, which forget all before, and where the trace restarts them.
    """
    took_s: list[float] = []
    num_hits = 0

    async def ask(client: httpx.AsyncClient, turn: Turn) -> None:
        nonlocal num_hits
        url, index = way.choose(turn.item)
        start_s = time.perf_counter()
        body = _body(turn)
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        if answer.is_error:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        took_s.append(time.perf_counter() - start_s)
        way.ended(index)
        num_hits += answer.json()["hit"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
        for url in urls:
            (await client.post(f"{url}/forget")).raise_for_status()
        await asyncio.sleep(_SETTLE_S)  # the gateway gets the event
        start_s = time.perf_counter()
        for turn in trace:
            await asyncio.sleep(max(0.0, start_s + turn.at_s - time.perf_counter()))
            if turn.restarts is not None:
                way.restarted(turn.restarts)
                await client.post(f"{urls[turn.restarts]}/forget")
            group.create_task(ask(client, turn))
    return num_hits / len(trace), took_s


def _body(turn: Turn) -> dict[str, object]:
    """Return a request with all messages of its conversation so far."""
    first: list[object] = [
        image_part(_urls()[turn.item]),
        {"type": "text", "text": f"Conversation {turn.conversation}: what is this?"},
    ]
    messages: list[object] = [{"role": "user", "content": first}]
    for number in range(turn.number):
        messages.append({"role": "assistant", "content": f"Answer {number}."})
        messages.append({"role": "user", "content": f"And question {number + 2}?"})
    return {"model": "m", "messages": messages}


@functools.cache
def _urls() -> list[str]:
    """Return different images."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 256, (_NUM_ITEMS, 16, 16, 3), dtype=np.uint8)
    return [data_url(encoded(Image.fromarray(pixels), "PNG"), "png") for pixels in drawn]
