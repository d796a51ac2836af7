"""Engine worker: views over a read-only map of the arena, and the model, or its part of it.

    python -m afferent.builtin.engine.worker.main FD      (started by the supervisor)

Features never pass through a socket: the worker gets their handles, reads them in place under pins
of its own, and unpins them. All workers of an engine get the same work, and answer alike.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import socket
import threading
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from afferent import keys
from afferent.builtin.engine import messages as m
from afferent.builtin.engine.kv_budget import KvBudget
from afferent.builtin.engine.launch import WorkerSettings
from afferent.builtin.engine.model.grids import as_arrays
from afferent.builtin.engine.worker.zygote import keep_one
from afferent.engines.protocol import Chosen, EngineInfo
from afferent.engines.weights import weights_digest
from afferent.errors import (
    AfferentError,
    ConfigError,
    ConnectionClosed,
    EngineUnavailable,
    FormatError,
    InternalError,
    UnsupportedModel,
    UnusableEmbeddings,
    in_a_line,
)
from afferent.runtime import wire
from afferent.runtime.process import LOST_PARTNERS, ChildProcess
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.types import Failure, Span, decode, encode, span_since

if TYPE_CHECKING:
    from afferent.builtin.engine.model.group import Group
    from afferent.builtin.engine.model.runner import Runner
    from afferent.builtin.engine.worker.encoding import ItemEncoder

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 30.0
_ENCODER_TAG = b"afferent/reference-encoder/v1"


class EngineWorker:
    def __init__(
        self,
        runner: Runner,
        encoder: ItemEncoder,
        store: DaemonStore,
        core: wire.SyncChannel,
        *,
        has_partners: bool,
    ) -> None:
        """Store the parts; ``has_partners``: other workers have parts of the model, too."""
        self._runner, self._encoder = runner, encoder
        self._store, self._core = store, core
        self._has_partners = has_partners
        self._num_failed_steps = 0

    def run(self) -> None:
        """Do the core's work until the core is gone."""
        while True:
            work = decode(m.to_worker_decoder, self._core.receive(timeout_s=None))
            if not isinstance(work, m.Work):
                raise FormatError("the core says what it has said before")
            self._core.send(encode(self._do(work)), timeout_s=None)

    def _do(self, work: m.Work) -> m.WorkDone:
        done = m.WorkDone(work.number, self._store.client_number, [], [], [], [], 0)
        for sequence_id in work.finished:
            self._runner.finish(sequence_id)
        for sequence_id in work.drop:
            self._runner.drop(sequence_id)
        for key in work.evict:
            self._encoder.evict(key)
        if work.lease:
            encoded = self._encoder.encode(work)
            done.failed_items, done.spans = encoded.failed, encoded.spans
            done.num_encoded = encoded.num_encoded
        failed: dict[str, Failure] = {}
        for begin in work.begin:
            self._begin(begin, failed)
        for more in work.extend:
            self._begin(more, failed)
        done.chosen = self._compute(work, failed, done.spans)
        for sequence_id in failed:
            self._runner.drop(sequence_id)
        done.failed_sequences = list(failed.items())
        return done

    def _begin(self, begin: m.Begin | m.Extend, failed: dict[str, Failure]) -> None:
        from afferent.builtin.engine.model.embeddings import PlacedItem

        try:
            items = [
                PlacedItem(item.modality, item.placeholder, item.key, as_arrays(item.grids))
                for item in begin.items
            ]
            given = (begin.sequence_id, begin.token_ids, items, begin.sampling)
            form_nbytes, has_answer = begin.form_nbytes, begin.has_answer
            if isinstance(begin, m.Extend):
                self._runner.extend(*given, form_nbytes=form_nbytes, has_answer=has_answer)
                return
            self._runner.begin(
                *given,
                num_answered=begin.num_answered,
                form_nbytes=form_nbytes,
                has_answer=has_answer,
                reuse=begin.reuse,
            )
        except AfferentError as error:
            failed[begin.sequence_id] = Failure(error.code, error.message)
        except Exception:
            log.exception("a sequence failed", extra={"request_id": begin.sequence_id})
            failed[begin.sequence_id] = _FAILED

    def _compute(
        self, work: m.Work, failed: dict[str, Failure], spans: list[tuple[str, Span]]
    ) -> list[Chosen]:
        """Return the chosen tokens of sequences that have not failed; add new failures to
        ``failed``.
        """

        while True:
            prefill = [chunk for chunk in work.prefill if chunk.sequence_id not in failed]
            if not prefill and not work.decode:
                return []
            start_ns = time.monotonic_ns()
            try:
                chosen = self._runner.run(prefill, work.decode, self._encoder.embeddings)
            except UnusableEmbeddings as error:
                failed[error.sequence_id] = Failure(error.code, error.message)
                continue
            except Exception:
                self._num_failed_steps += 1
                if self._has_partners or self._num_failed_steps > 1:
                    # The partners may have diverged, or this process is unusable.
                    raise
                # The state of each of the sequences is unknown.
                log.exception("a step failed")
                sequences = [*(chunk.sequence_id for chunk in prefill), *work.decode]
                failed |= dict.fromkeys(sequences, _FAILED)
                return []
            self._num_failed_steps = 0
            failed |= self._runner.failed
            for chunk in prefill:
                note = f"{chunk.num_tokens} token{'s' if chunk.num_tokens > 1 else ''}"
                span = span_since(start_ns, "worker", "prefill", note=note)
                spans.append((chunk.sequence_id, span))
            return chosen


_FAILED = Failure(InternalError.code, "the engine failed on this request")


def watch(core: socket.socket) -> None:
    """End this process when the core is gone, or has cut its connection, at any time."""
    poll = select.poll()
    poll.register(core.fileno(), select.POLLRDHUP)

    def wait() -> None:
        poll.poll()
        os._exit(LOST_PARTNERS)

    threading.Thread(target=wait, name="watch-core", daemon=True).start()


def rendezvous(core: wire.SyncChannel, settings: WorkerSettings) -> Group | None:
    """Send a hello to the core, and wait for the other workers; ``None`` if there are no others."""
    from afferent.builtin.engine.model.group import Group

    rank, size = settings.rank, settings.num_workers
    group = Group.host(size) if rank == 0 and size > 1 else None
    hello = m.WorkerHello(rank, 0 if group is None else group.port)
    core.send(encode(hello), timeout_s=_CONNECT_TIMEOUT_S)
    told = decode(m.to_worker_decoder, core.receive(timeout_s=None))
    if not isinstance(told, m.Rendezvous):
        raise FormatError("the core gives work to a worker that has no model")
    return group if rank == 0 else Group.join(told.port, rank=rank, size=size)


def load(child: ChildProcess, settings: WorkerSettings, core: wire.SyncChannel) -> Runner:
    """Load the model, or its part of it. The operator gets one line about a model that can't be
    served.
    """
    from afferent.builtin.engine.model.runner import Runner

    group = rendezvous(core, settings)
    child.report("loading the model")
    folder, family = Path(settings.model_folder), settings.family
    try:
        return Runner(folder, family, max_model_len=settings.max_model_len, group=group)
    except ConfigError as error:
        child.refuse(error.message)
    except UnsupportedModel as error:
        child.refuse(f"{error.message}; --engine vllm may serve it")
    except EngineUnavailable:  # the other ranks are not there; they may come
        raise
    except Exception as error:
        log.debug("the model can't be loaded", exc_info=True)
        child.refuse(f"the model in {folder} can't be loaded: {in_a_line(error)}")


def _encoder_digest(folder: Path) -> bytes:
    """Return the digest of everything that shapes embeddings besides an item's features.

    Embeddings may come from another machine with other versions of the libraries. ``config.json``
    is a part of the digest, and names the dtype.
    """
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return keys.frame(_ENCODER_TAG, weights_digest(folder), versions.encode())


def _capacity(info: EngineInfo, kv_budget: KvBudget) -> str:
    """Return a line about the capacity for requests, compared with the model's limit."""
    bounded, num_tokens = kv_budget.bounded(info), kv_budget.tokens_for(info)
    in_all = "" if num_tokens is None else f", {num_tokens:,} in all"
    if bounded.max_model_len < info.max_model_len:
        in_all = f", for which there is room, of {info.max_model_len:,}"
    return f"up to {bounded.max_model_len:,} tokens a request{in_all}"


def main() -> None:
    child = ChildProcess.start()
    settings = child.settings(WorkerSettings)
    child.report("importing torch and transformers")
    import_model(Path(settings.model_folder))
    raise SystemExit(keep_one(child, partial(_work, child, settings)))


def import_model(folder: Path) -> None:
    """Import the modules that each worker needs. A worker reports errors of the model itself, when
    it loads it.
    """
    gc.disable()  # imports create hundreds of thousands of objects, and no garbage: a fifth faster
    try:
        from afferent.builtin.engine.model.runner import model_class
        from afferent.builtin.engine.worker import encoding  # noqa: F401

        with contextlib.suppress(Exception):
            model_class(folder)
    finally:
        gc.enable()


def _work(child: ChildProcess, settings: WorkerSettings) -> None:
    """Run a worker, in a process of its own."""
    from afferent.builtin.engine.worker.encoding import ItemEncoder
    from afferent.builtin.engine.worker.page_lock import PageLock

    sock = wire.connect(settings.core_address, timeout_s=_CONNECT_TIMEOUT_S)
    core = wire.SyncChannel(sock, max_nbytes=m.MAX_WORK_NBYTES)
    watch(core.sock)
    runner = load(child, settings, core)
    publishes = settings.shares_embeddings and settings.rank == 0
    weights = _encoder_digest(Path(settings.model_folder)) if publishes else b""
    store = DaemonStore(settings.store_address, name=child.name, writable=publishes)
    published = ItemCache(store, weights=weights) if publishes else None
    page_lock = PageLock.of_this_machine()
    encoder = ItemEncoder(runner, store, published=published, page_lock=page_lock)
    info = settings.kv_budget.bounded(runner.info)
    ready = m.WorkerReady(store.client_number, info, weights)
    core.send(encode(ready), timeout_s=_CONNECT_TIMEOUT_S)
    child.report(_capacity(runner.info, settings.kv_budget), ready=True)
    # A step may take minutes on a slow processor; the core limits it.
    child.beat_in_thread()
    try:
        has_partners = settings.num_workers > 1
        EngineWorker(runner, encoder, store, core, has_partners=has_partners).run()
    except ConnectionClosed:
        log.info("the core is gone")
        raise SystemExit(LOST_PARTNERS) from None
    finally:
        if page_lock is not None:
            page_lock.release()


if __name__ == "__main__":
    main()
