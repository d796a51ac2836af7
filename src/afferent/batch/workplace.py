"""Place where `afferent.Features` makes features: this process, a pool, or a server's workers."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from afferent.batch.item_features import Form, ItemFeatures
from afferent.batch.pinned_trees import AsyncFeatureStore, FeatureStore
from afferent.batch.shared_item import SharedItem, connections
from afferent.config import Limits
from afferent.errors import (
    ConfigError,
    NotPermitted,
    StoreRestarted,
    StoreUnavailable,
    UnsupportedModel,
)
from afferent.media.families import hub
from afferent.media.families.plan import Prompt
from afferent.store.block import codec, torch_tensors
from afferent.types import ContentKey, Modality
from afferent.wording import any_of

if TYPE_CHECKING:
    from afferent.batch.media_model import Backend, MediaModel
    from afferent.batch.media_sources import Source
    from afferent.batch.through_store import StoreSteps
    from afferent.batch.worker_pool import WorkerPool

HERE: Final = "here"
POOL: Final = "pool"
STORE_NAME: Final = "features"
RETRIED_FOR_S: Final = 30.0
"""Time for the restart of a store."""
RETRY_S: Final = 0.05
_FORMS: Final = ("compact", "hf")
_ITEM_TIMEOUT_S: Final = 180.0
_SERVERS_IN_FLIGHT: Final = 16
_FOR_EACH_WORKER: Final = 4

Where = str | Callable[[], str]
"""A place by its name or address, or a function that returns the address of a store."""


def of_extra(name: str) -> ModuleType:
    """Import a module that needs the extra ``decoders``.

    Raises:
        ConfigError: The extra is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Features needs {error.name}: install the decoders with pip install "
            "'afferent-mm[decoders]'"
        ) from error


def check_form(form: str, tensors: str) -> None:
    """Check the requested form of results.

    Raises:
        ConfigError: One of the values is wrong.
    """
    if form not in _FORMS:
        raise ConfigError(f"form={form!r}: must be {any_of(_FORMS)}")
    if tensors not in ("numpy", "torch"):
        raise ConfigError(f"tensors={tensors!r}: must be numpy or torch")


class Workplace:
    """Model, and the processes that make its features; arguments as for `Features`."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        where: Where,
        num_workers: int | None,
        backend: Backend | None,
        revision: str,
        arena_nbytes: int,
        limits: Mapping[str, Any] | None,
    ) -> None:
        if num_workers is not None and (where != POOL or num_workers < 1):
            raise ConfigError(
                f"num_workers={num_workers}: at least 1, and only with where={POOL!r}"
            )
        models = of_extra("afferent.batch.media_model")
        if backend not in (None, *models.RULES):
            raise ConfigError(f"backend={backend!r}: must be {any_of(models.RULES)}")
        self.folder = hub.find_model(os.fspath(model), revision=revision, needs_weights=False)
        self.where, self._backend = where, backend
        self._limits = dict(limits or {})
        self._num_workers = num_workers or len(os.sched_getaffinity(0))
        self._lock, self._opened, self._is_closed = threading.Lock(), _NOT_OPENED, False
        self._pool: WorkerPool | None = None
        self.model: MediaModel = models.MediaModel.load(
            self.folder, backend=backend or models.default_backend(), limits=_limits_of(limits)
        )
        if where == POOL:
            self._pool = of_extra("afferent.batch.worker_pool").WorkerPool(
                *(self.model.family, self.model.limits),
                num_workers=self._num_workers,
                arena_nbytes=arena_nbytes,
            )
        elif where != HERE:
            self.model = self._matching_model()

    def _matching_model(self) -> MediaModel:
        """Return the model with the rules of the server's features.

        A store whose address a function names may be lost meanwhile, and come back elsewhere.
        """
        servers = of_extra("afferent.batch.server_check")
        deadline_s = time.monotonic() + RETRIED_FOR_S
        while True:
            try:
                found: MediaModel = servers.matching_model(
                    self.model, self.address, backend=self._backend
                )
            except (StoreUnavailable, StoreRestarted):
                if not callable(self.where) or time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)
            else:
                return found

    @property
    def address(self) -> str | None:
        """Address of the store of the pool or the server; ``None`` in this process.

        Raises:
            Unavailable: The pool has ended.
        """
        if self._pool is not None:
            self._pool.check()
            return self._pool.address
        if callable(self.where):
            store, pid = self._opened.store, self._opened.pid
            is_open = store is not None and store.is_open and pid == os.getpid()
            return store.address if store is not None and is_open else self.where()
        return None if self.where == HERE else self.where

    @property
    def arguments(self) -> tuple[str, Where, Backend | None, dict[str, Any]]:
        """Arguments of the same in another process, which uses the pool of this one."""
        where = self.where if callable(self.where) else self.address or HERE
        return str(self.folder), where, self._backend, self._limits

    def num_in_flight(self, given: int | None) -> int:
        """Return the most items that are taken before their results are.

        Raises:
            ConfigError: The given number is wrong.
        """
        if given is not None and given < 1:
            raise ConfigError(f"in_flight={given}: must be at least 1")
        if self.where == HERE:
            return 1
        usual = self._num_workers * _FOR_EACH_WORKER if self._pool else _SERVERS_IN_FLIGHT
        return given or usual

    def check_store(self) -> None:
        """Check that there is a store, or will be one again.

        Raises:
            ConfigError: There is none.
            NotPermitted: This object was closed.
            Unavailable: The pool has ended.
        """
        if self.where == HERE:
            raise ConfigError(
                "share and share_many need a store: Features(model, where='pool'), or the address "
                "of a server's store"
            )
        if self._is_closed:
            raise NotPermitted("this Features is closed")
        self._check_pool()

    def store(self) -> FeatureStore:
        """Return this process's connection; a forked process opens its own.

        If the store of a function's address is gone, the function is called again.

        Raises:
            NotPermitted: This object was closed.
            Unavailable: The store is gone, or the pool has ended.
        """
        with self._lock:
            self.check_store()
            former = self._opened.store if self._opened.pid == os.getpid() else None
            if former is not None and (former.is_open or not callable(self.where)):
                return former
            address = self.address or ""
            if former is not None:
                if former.address == address:  # it reconnects by itself
                    return former
                former.close()
            store = FeatureStore(address, name=STORE_NAME, writable=True)
            self._opened = _Opened(os.getpid(), store)
            return store

    def steps_over(self, verbs: Any) -> StoreSteps:
        """Return the steps of items over the verbs of a store."""
        steps: StoreSteps = of_extra("afferent.batch.through_store").StoreSteps(
            verbs, self.model, timeout_s=_ITEM_TIMEOUT_S
        )
        return steps

    def file_of(
        self, source: Source, form: Form, modality: Modality | None
    ) -> tuple[memoryview, Modality, ContentKey]:
        """Return a source as a file for a worker, its modality, and the key of its features.

        Raises:
            InvalidMedia: The item can't be used.
            UnsupportedModel: The form needs the model's own processor in this process.
            Unavailable: The pool has ended.
        """
        model = self.model
        self._check_pool()
        if model.family_for(form) is not model.family:
            raise UnsupportedModel(
                'form="hf" of this model is made by its own processor, which runs with '
                'where="here" only'
            )
        sources = of_extra("afferent.batch.media_sources")
        with sources.as_our_error():
            opened = sources.read(
                source, form=form, sample_rate_hz=model.family.sample_rate_hz, limits=model.limits
            )
            data: memoryview = sources.as_file(opened, form)
            kind = model.modality(data, modality)
            return data, kind, model.key(data, kind)

    def finished(
        self,
        arrays: Mapping[str, Any],
        prompt: Prompt,
        key: ContentKey | None,
        *,
        form: Form,
        tensors: codec.Library,
    ) -> ItemFeatures:
        """Return the result of an item, from the features of `MediaModel.family_for`."""
        arrays, made_by = self.model.in_form(arrays, form), self.model.producer(form)
        if tensors == "torch":
            arrays = {name: torch_tensors.as_tensor(each) for name, each in arrays.items()}
        return ItemFeatures(arrays, prompt=prompt, form=form, made_by=made_by, key=key)

    def shared(
        self, store: FeatureStore | AsyncFeatureStore, key: ContentKey, tree: dict[str, Any]
    ) -> SharedItem:
        """Return the reference to a tree of pinned views of a store."""
        return SharedItem.pinned(store, key, tree, self.model.producer("compact"))

    def _check_pool(self) -> None:
        if self._pool is not None:
            self._pool.check()

    def close(self) -> None:
        """End the pool, and this process's connection."""
        with self._lock:
            opened, self._opened, self._is_closed = self._opened, _NOT_OPENED, True
        if opened.store is not None and opened.pid == os.getpid():
            opened.store.close()
        if self._pool is not None and self._pool.is_here:
            connections.drop(self._pool.address)
            self._pool.close()


@dataclass(frozen=True, slots=True)
class _Opened:
    """Connection of one process."""

    pid: int
    store: FeatureStore | None


_NOT_OPENED: Final = _Opened(0, None)


def _limits_of(given: Mapping[str, Any] | None) -> Limits:
    try:
        return Limits(**(given or {}))
    except TypeError as error:
        raise ConfigError(f"limits: {error}") from error
