"""One side of `benchmarks.gate` in one regime, for several runs."""

from __future__ import annotations

import contextlib
import http
from collections.abc import Iterator

from afferent.types import MiB
from benchmarks.gate_load import Sender
from benchmarks.gate_memory import Sampler, private_nbytes
from benchmarks.gate_servers import Server, Starter

_NUM_WARM_UP, _NUM_LONG_WARM_UP = 2, 6  # before a run; before all of them, until heaps don't grow


class Side:
    """One side in one regime."""

    def __init__(
        self, starter: Starter, prefill_s: float, num_requests: int, sender: Sender
    ) -> None:
        self._starter, self._prefill_s = starter, prefill_s
        self._num_requests, self._sender = num_requests, sender
        self._server: Server | None = None
        self.samples: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """Start the side once for all runs; else each run starts it, as a heap does not shrink."""
        with self._starter(self._prefill_s) as self._server:
            self._warm_up(self._server, _NUM_LONG_WARM_UP)
            yield

    def run(self) -> None:
        if self._server is not None:
            self._run(self._server)
            return
        with self._starter(self._prefill_s) as server:
            self._warm_up(server, _NUM_WARM_UP)
            self._run(server)

    def _warm_up(self, server: Server, num_requests: int) -> None:
        self._sender.prepare(server.port, num_requests)
        self._sender.send()

    def _run(self, server: Server) -> None:
        server.forget()
        self._sender.prepare(server.port, self._num_requests)
        base_nbytes, before_nbytes = private_nbytes(server.pids), server.growing_nbytes()
        with Sampler(server.growing_nbytes) as memory:
            outcome = self._sender.send()
        growth_nbytes = memory.peak - before_nbytes + server.arena_nbytes
        num_ok = outcome.statuses.count(http.HTTPStatus.OK)
        for name, value in (
            ("requests_per_s", num_ok / outcome.elapsed_s),
            ("peak_growth_nbytes", growth_nbytes),
            ("base_nbytes", base_nbytes),
            ("growth_mib", growth_nbytes / MiB),
            ("base_mib", base_nbytes / MiB),
            ("ok", num_ok),
            ("refused", len(outcome.statuses) - num_ok),
        ):
            self.samples.setdefault(name, []).append(value)
