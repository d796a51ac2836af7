"""Replicas of Ray Serve in place of a model's, a router by items, and a policy by waiting time.

The router and the policy are the candidates that `benchmarks.ray_serve` compares with Ray's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from benchmarks.controls.caching_replicas import CAPACITY, HIT_S, MISS_S

_SESSION: Final = "x-session-id"
_IMAGE_S: Final = 0.05
"""Seconds that a replica works on an image of a request; it works on one at a time."""
_MOST_RANKS: Final = 3


class CachingReplica:
    """Replica that caches the images it used last, by the digests in `x-session-id`.

    A body without such a header is read, and answered at once.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[str, None] = OrderedDict()

    async def __call__(self, request: Request) -> Response:
        if request.method != "POST":
            return Response()
        await request.body()
        if (item := request.headers.get(_SESSION)) is None:
            return Response()
        is_hit = item in self._items
        self._items[item] = None
        self._items.move_to_end(item)
        if len(self._items) > CAPACITY:
            self._items.popitem(last=False)
        await asyncio.sleep(HIT_S if is_hit else MISS_S)
        return JSONResponse({"choices": [], "hit": is_hit})

    def record_routing_stats(self) -> dict[str, Any]:
        """Report its images, each half second, to routers that use them."""
        return {"items": list(self._items)}


class BusyReplica:
    """Replica that processes the images of one request at a time; their files differ in bytes.

    It predicts how long a next request would wait from the bytes that wait, and from the time that
    a byte has taken so far.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._done_s = 0.0
        self._waiting_nbytes = self._done_nbytes = 0

    async def __call__(self, request: Request) -> Response:
        if (images := int(request.query_params.get("images", 0))) == 0:
            return Response()
        nbytes, work_s = int(request.query_params["nbytes"]), _IMAGE_S * images
        self._waiting_nbytes += nbytes
        async with self._turn:
            await asyncio.sleep(work_s)
        self._waiting_nbytes -= nbytes
        self._done_s += work_s
        self._done_nbytes += nbytes
        return Response()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the predicted wait of a next request."""
        pace = self._done_s / self._done_nbytes if self._done_nbytes else 0.0
        return {"wait_s": self._waiting_nbytes * pace}


class ByWait:
    """Policy that keeps the mean of the waits that replicas report near a target."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        waits = (context.aggregated_metrics or {}).get("wait_s", {})
        return sum(waits.values()) / self._target_s, {}


class BySchedule:
    """Policy that gives numbers of replicas, each from a time on."""

    def __init__(self, numbers: Sequence[tuple[float, int]]) -> None:
        self._numbers = numbers

    def __call__(self, _: Any) -> tuple[float, dict[str, Any]]:
        return [number for from_s, number in self._numbers if from_s <= time.time()][-1], {}


class ByItems(RequestRouter):  # type: ignore[misc]
    """Router that prefers a replica that has the image; the others follow by rendezvous hashing."""

    async def choose_replicas(
        self, candidate_replicas: Sequence[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True
        session = pending_request.metadata.session_id

        def rank(replica: Any) -> tuple[bool, bytes]:
            name = f"{session}:{replica.replica_id.unique_id}"
            has_it = session in replica.routing_stats.get("items", ())
            return has_it, hashlib.sha256(name.encode()).digest()

        return [[each] for each in sorted(candidate_replicas, key=rank, reverse=True)[:_MOST_RANKS]]
