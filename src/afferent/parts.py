"""Which processes make up a server, and what each is told.

This imports none of them: a supervisor that waits for what HTTP servers and decoders import is one
that its children wait for.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import Struct

from afferent.config import ServeConfig
from afferent.engine.kv_budget import KvBudget
from afferent.engine.launch import CORE, WORKER, CoreSettings, WorkerSettings
from afferent.listening import Port
from afferent.preprocess import launch as preprocess
from afferent.preprocess.registry import AnyFamily
from afferent.process import Child
from afferent.serve import launch as serve
from afferent.store.launch import DAEMON
from afferent.store.server import Estate

_MIN_RECOVERY_S = 60.0
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
"""No progress bars between our lines, and nothing looked up on a hub."""


@dataclass(slots=True, eq=False)
class Part:
    """One child process, and how to start it again."""

    name: str
    module: str
    settings: Callable[[], Struct]
    """For each start anew."""
    fds: tuple[int, ...] = ()
    port: Port | None = None
    """Its settings get ``listener_fd``, a socket for each start."""
    env: dict[str, str] = field(default_factory=dict)
    needs_arena: bool = True
    """At its start; what does not is started while the arena is allocated."""
    child: Child | None = None
    pidfd: int = -1
    is_ready: bool = False
    has_been_ready: bool = False
    num_failed_starts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all parts of one server have in common."""

    config: ServeConfig
    folder: Path
    """Of the model."""
    model_name: str
    family: AnyFamily
    kv_budget: KvBudget
    port: Port
    estate: Estate
    core_address: str
    core_fd: int
    """A socket that listens there."""

    def parts(self) -> list[Part]:
        return [
            *self._engine_workers(),
            self._store(),
            self._core(),
            self._preprocess(),
            *self._frontends(),
        ]

    def _engine_workers(self) -> list[Part]:
        """One for each rank; the core sees to it that they start and end together."""
        num_workers = self.config.engine_workers
        num_threads = min(8, max(1, (os.cpu_count() or 2) - 1)) // num_workers
        env = {"OMP_NUM_THREADS": str(max(1, num_threads)), **_QUIET}
        names = [f"worker-{rank}" if num_workers > 1 else "worker" for rank in range(num_workers)]
        return [
            Part(name, WORKER, partial(self._worker_settings, rank), env=env, needs_arena=False)
            for rank, name in enumerate(names)
        ]

    def _worker_settings(self, rank: int) -> WorkerSettings:
        return WorkerSettings(
            store_address=self.estate.address,
            core_address=self.core_address,
            rank=rank,
            num_workers=self.config.engine_workers,
            model_folder=str(self.folder),
            family=self.family,
            max_model_len=self.config.max_model_len,
            kv_budget=self.kv_budget,
            shares_embeddings=self.config.embeddings_share > 0,
        )

    def _core(self) -> Part:
        config = self.config
        settings = CoreSettings(
            store_address=self.estate.address,
            listener_fd=self.core_fd,
            num_workers=config.engine_workers,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_step_embeds=config.max_step_embeds,
            encoder_cache_nbytes=config.encoder_cache_nbytes,
            kv_budget=self.kv_budget,
            step_timeout_s=config.engine_step_timeout_s,
        )
        return Part("core", CORE, lambda: settings, fds=(self.core_fd,))

    def _store(self) -> Part:
        config, estate = self.config, self.estate
        segments = itertools.count(1)  # each daemon begins a new epoch: the others connect again
        return Part(
            "store",
            DAEMON,
            lambda: estate.settings(
                next(segments),
                shares=config.shares,
                job_timeout_s=config.preprocess_timeout_s,
                # An encoder or a decoder may hold on for as long as an item may take.
                recovery_timeout_s=max(_MIN_RECOVERY_S, config.preprocess_timeout_s),
            ),
            fds=estate.fds,
        )

    def _preprocess(self) -> Part:
        config = self.config
        settings = preprocess.PoolSettings(
            store_address=self.estate.address,
            family=self.family,
            limits=config.limits,
            num_workers=config.num_preprocess_workers,
            item_timeout_s=config.preprocess_timeout_s,
            memory_nbytes=config.preprocess_memory_nbytes,
        )
        env = {**preprocess.ENV, **_QUIET}
        return Part("preprocess", preprocess.POOL, lambda: settings, env=env)

    def _frontends(self) -> list[Part]:
        settings = serve.FrontendSettings(
            store_address=self.estate.address,
            core_address=self.core_address,
            model_folder=str(self.folder),
            model_name=self.model_name,
            family=self.family,
            config=self.config,
        )
        return [
            Part(
                f"frontend-{number}",
                serve.FRONTEND,
                lambda: settings,
                port=self.port,
                env=serve.ENV,
            )
            for number in range(self.config.frontends)
        ]
