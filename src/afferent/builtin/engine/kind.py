"""Description of the built-in engine: its needs, and its processes.

It imports none of them. A core takes requests; workers, one for each rank, compute; a separate
process tests response formats.
"""

from __future__ import annotations

from pathlib import Path

from afferent.builtin.engine import launch
from afferent.builtin.engine.kv_budget import KvBudget, kv_budget
from afferent.builtin.engine.settings import ReferenceSettings
from afferent.engines.contract import EnginePlan, EngineProcess, EngineSite
from afferent.engines.remote.kind import Listening, RemoteKind, RemoteLink, listening
from afferent.engines.weights import check_weights, weights_nbytes
from afferent.media.families.registry import POSITION_FEATURES, facts_of
from afferent.runtime import cgroup
from afferent.runtime.process import ONE_THREAD
from afferent.telemetry.trace import declare_stages
from afferent.types import MiB, ObjectKind

# Frontends count these stages; they import this description and none of the processes.
declare_stages("form", "accept", "encode", "copy_embeddings", "prefill", "decode_tokens")

_WORKER_NBYTES = 384 * MiB
"""Memory of an idle worker and its zygote, without its part of the model: 250 MiB, for imports of
torch mostly.
"""
_FORMS_NBYTES = 192 * MiB
"""Memory of the core, of the process that tests response formats, and of a worker's token masks."""
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
"""No progress bars between the server's lines, and no lookups on a hub."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ReferenceEngine(RemoteKind[ReferenceSettings]):
    """`transformers` models, computed plainly: the baseline of every comparison of answers."""

    name = "reference"
    summary = "models of transformers as they are; for tests and small models"
    settings_type = ReferenceSettings

    def check(self, model_folder: Path, settings: ReferenceSettings) -> None:
        """See `Backend.check`."""
        check_weights(model_folder)
        launch.check_workers(model_folder, settings.tensor_parallel_size)
        launch.check_length(model_folder, settings.max_model_len)

    def reserved_nbytes(self, model_folder: Path, settings: ReferenceSettings) -> int:
        """See `Backend.reserved_nbytes`."""
        worker_nbytes = _WORKER_NBYTES + settings.encoder_cache_nbytes
        return settings.tensor_parallel_size * worker_nbytes + _FORMS_NBYTES

    def plan(self, site: EngineSite, settings: ReferenceSettings) -> EnginePlan[RemoteLink]:
        """See `Backend.plan`."""
        budget = kv_budget(
            settings,
            left_nbytes=site.left_nbytes,
            weights_nbytes=weights_nbytes(site.model_folder),
        )
        at = listening("core")
        processes = (
            *_workers(site, settings, budget, at.link),
            _core(site, settings, budget, at),
            _forms(site, at.link),
        )
        room = f"{budget.nbytes / 2**20:,.0f} MiB for the KV cache of requests"
        return EnginePlan(processes=processes, link=at.link, notes=(room,) if budget.nbytes else ())


def _workers(
    site: EngineSite, settings: ReferenceSettings, budget: KvBudget, link: RemoteLink
) -> list[EngineProcess]:
    """Return one process for each rank; the core starts and ends their work together."""
    num_workers = settings.tensor_parallel_size
    num_threads = min(8, max(1, cgroup.num_cores() - 1)) // num_workers
    return [
        EngineProcess(
            name=f"worker-{rank}" if num_workers > 1 else "worker",
            module=launch.WORKER,
            settings=launch.WorkerSettings(
                store_address=site.store_address,
                core_address=link.address,
                rank=rank,
                num_workers=num_workers,
                model_folder=str(site.model_folder),
                family=site.needed_family,
                max_model_len=settings.max_model_len,
                kv_budget=budget,
                shares_embeddings=site.shares[ObjectKind.EMBEDDINGS] > 0,
            ),
            env={**dict.fromkeys(_THREADS, str(max(1, num_threads))), **_QUIET},
        )
        for rank in range(num_workers)
    ]


def _forms(site: EngineSite, link: RemoteLink) -> EngineProcess:
    return EngineProcess(
        name="forms",
        module=launch.FORMS,
        settings=launch.FormSettings(
            core_address=link.address, model_folder=str(site.model_folder)
        ),
        env=ONE_THREAD,
    )


def _core(
    site: EngineSite, settings: ReferenceSettings, budget: KvBudget, at: Listening
) -> EngineProcess:
    return EngineProcess(
        name="core",
        module=launch.CORE,
        env=ONE_THREAD,
        settings=launch.CoreSettings(
            store_address=site.store_address,
            listener_fd=at.fd,
            num_workers=settings.tensor_parallel_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_batched_embeds=settings.max_num_batched_embeds,
            encoder_cache_nbytes=settings.encoder_cache_nbytes,
            prefix_cache_tokens=settings.prefix_cache_tokens,
            kv_budget=budget,
            step_timeout_s=settings.engine_step_timeout_s,
            position_features=POSITION_FEATURES | facts_of(site.model_folder).position_features,
            has_tier=site.has_tier,
        ),
        fds=(at.fd,),
    )
