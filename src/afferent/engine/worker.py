"""The engine worker: views over a read-only map of the arena, and the model.

    python -m afferent.engine.worker FD      (started by the supervisor)

Features never pass through a socket: the worker is told where they are, pins them under its own
connection to the store, reads them in place and lets go.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from afferent import wire
from afferent.engine import messages as m
from afferent.engine.protocol import EngineRequest
from afferent.errors import AfferentError, FormatError, InternalError, StoreUnavailable
from afferent.preprocess.registry import AnyFamily
from afferent.process import ChildProcess
from afferent.store import codec
from afferent.store.client import DaemonStore
from afferent.types import Failure, Item, Span, decode, encode, span_since

if TYPE_CHECKING:
    from afferent.engine.runner import EncodedItem, Runner

log = logging.getLogger(__name__)

_GRIDS = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
_CONNECT_TIMEOUT_S = 30.0


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    store_address: str
    core_address: str
    model_folder: str
    family: AnyFamily
    max_model_len: int


class EngineWorker:
    def __init__(self, runner: Runner, store: DaemonStore, core: wire.SyncChannel) -> None:
        self._runner, self._store, self._core = runner, store, core

    def say_hello(self) -> None:
        """The core gives this worker its work from now on."""
        hello = m.WorkerHello(os.getpid(), self._runner.info)
        self._core.send(encode(hello), timeout_s=_CONNECT_TIMEOUT_S)

    def run(self) -> None:
        """Do steps until the core is gone."""
        while True:
            step = decode(m.to_worker_decoder, self._core.receive(timeout_s=None))
            self._core.send(encode(self._do(step)), timeout_s=_CONNECT_TIMEOUT_S)

    def _do(self, step: m.RunStep) -> m.StepDone:
        done = m.StepDone([], [], [])
        for sequence_id in step.drop:
            self._runner.drop(sequence_id)
        if step.prefill is not None:
            request = step.prefill
            self._attempt(request.request_id, done, lambda: self._prefill(request, done.spans))
        for sequence_id in step.decode:
            self._attempt(sequence_id, done, lambda: self._runner.decode(sequence_id))  # noqa: B023
        return done

    def _attempt(self, sequence_id: str, done: m.StepDone, work: Callable[[], int]) -> None:
        """One sequence's part of a step; what goes wrong is that sequence's failure alone."""
        try:
            done.tokens.append((sequence_id, work()))
        except AfferentError as error:
            done.failures.append((sequence_id, Failure(error.code, error.message)))
            self._runner.drop(sequence_id)
        except Exception:
            log.exception("a sequence failed", extra={"request_id": sequence_id})
            failure = Failure(InternalError.code, "the engine failed on this request")
            done.failures.append((sequence_id, failure))
            self._runner.drop(sequence_id)

    def _prefill(self, request: EngineRequest, spans: list[Span]) -> int:
        request_id = request.request_id
        encoded = self._encode(request_id, request.items, spans) if request.items else []
        start_ns = time.monotonic_ns()
        token = self._runner.prefill(request_id, request.token_ids, encoded, request.sampling)
        note = f"{request_id} {len(request.token_ids)} tokens"
        spans.append(span_since(start_ns, "worker", "prefill", note=note))
        return token

    def _encode(self, request_id: str, items: list[Item], spans: list[Span]) -> list[EncodedItem]:
        """Each item's placeholder, grid and embeddings; the views are gone when this returns."""
        from afferent.engine.runner import EncodedItem

        start_ns = time.monotonic_ns()
        handles = [item.handle for item in items]
        self._store.get(request_id, handles)
        try:
            trees = [codec.view(self._store.block(handle)) for handle in handles]
            viewed = sum(handle.nbytes for handle in handles)
            note = f"{request_id} {viewed / 1000:,.0f} kB in place"
            spans.append(span_since(start_ns, "worker", "map views", note=note))
            start_ns = time.monotonic_ns()
            encoded = []
            for item, tree in zip(items, trees, strict=True):
                features = _tensors(tree)
                embeddings = self._runner.encode(item.modality, features)
                # Positions need the grids after the views are gone; they are a few numbers.
                grids = {name: features[name].copy() for name in _GRIDS & features.keys()}
                encoded.append(EncodedItem(item.modality, item.placeholder, grids, embeddings))
            num = len(items)
            note = f"{request_id} {num} item{'s' if num > 1 else ''}"
            spans.append(span_since(start_ns, "worker", "encode", note=note))
            return encoded
        finally:
            with contextlib.suppress(StoreUnavailable):  # a store that is gone holds nothing
                self._store.release(request_id)


def _tensors(tree: codec.ViewTree) -> dict[str, NDArray[Any]]:
    """Features are a flat dictionary: tensors, and how the item is written in the prompt."""
    if not isinstance(tree, dict):
        raise FormatError("an item's features are not a dictionary")
    tensors = {name: array for name, array in tree.items() if isinstance(array, np.ndarray)}
    if tree.keys() - tensors.keys() != {"prompt"}:
        raise FormatError("an item's features are not tensors only")
    return tensors


def main() -> None:
    child = ChildProcess.start()
    settings = child.settings(Settings)
    child.report("importing torch and transformers")
    from afferent.engine.runner import Runner

    child.report("loading the model")
    folder = Path(settings.model_folder)
    runner = Runner(folder, settings.family, max_model_len=settings.max_model_len)
    store = DaemonStore(settings.store_address, name="worker")
    core = wire.connect(settings.core_address, timeout_s=_CONNECT_TIMEOUT_S)
    worker = EngineWorker(runner, store, wire.SyncChannel(core))
    worker.say_hello()
    child.report(f"up to {runner.info.max_model_len:,} tokens a request", ready=True)
    try:
        worker.run()
    except wire.ConnectionClosed:
        log.info("the core is gone")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
