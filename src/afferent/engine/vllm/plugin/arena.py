"""Reading what references lead to. A process has one store, connected when it is first needed."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from afferent.engine.references import Of, Reference, verify
from afferent.engine.vllm import place
from afferent.engine.vllm.plugin.arrivals import Arrivals, Step
from afferent.errors import (
    AfferentError,
    ConfigError,
    FormatError,
    StaleHandle,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.quota.permits import GATE
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import Find
from afferent.types import Handle, ObjectKind

log = logging.getLogger("vllm.afferent")

_RECONNECT_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.02


class Gone(Exception):
    """What a reference led to is there no more."""


class Arena:
    """The store, as a process of vLLM sees it."""

    def __init__(self, where: place.Place, *, name: str) -> None:
        self._where = where
        self.store = DaemonStore(
            where.address, name=f"vllm {name} {os.getpid()}", writable=name == "worker"
        )
        self._secret = where.secret()
        self._requests = itertools.count()
        self._arrivals, self._processed = Arrivals(), Arrivals()
        self._arrivals_lock = threading.Lock()

    def verify(self, url: str) -> Reference:
        """What a URL stands for.

        Raises:
            FormatError: It is no reference of the server as it runs now.
        """
        try:
            return verify(url, self._secret)
        except FormatError:
            self._secret = self._where.secret()  # the server may have been started again
            return verify(url, self._secret)

    def admit(self, of: Of, *, is_processed: bool) -> None:
        """See to it that the request of a reference is there; one that ended has lost its media.

        Args:
            is_processed: Whether the engine has nothing to process when it has all references: the
                request then leaves the gate.

        Raises:
            Gone: It has ended.
        """
        with self._arrivals_lock:
            step = self._arrivals.note(of)
        if step is Step.NOTHING:
            return
        left = GATE if step is Step.LAST and is_processed else ()
        try:
            is_there = self._again(lambda: self.store.accept(of.request, left))
        except AfferentError as error:
            raise Gone("the store does not answer") from error
        if not is_there:
            raise Gone("the request that they belong to has ended")

    def leave(self, processed: Iterable[Of]) -> None:
        """Say that the engine has processed items; a request leaves the gate with its last item.

        A request with several prompts is processed in several parts.
        """
        for of in processed:
            with self._arrivals_lock:
                step = self._processed.note(of)
            if step is Step.LAST:
                self.store.accepted(of.request, GATE)

    @contextmanager
    def request(self, what: str) -> Iterator[str]:
        """A name for what is pinned within the context, and let go of at its end."""
        request = f"{what}-{next(self._requests)}"
        try:
            yield request
        finally:
            self.store.forget(request)

    def pin(self, request: str, items: Sequence[tuple[bytes, Handle]]) -> list[bool]:
        """Pin features, given by key and place; whether each is there.

        What is not there as it was meant is deleted, so that who waits for an answer from it, and
        looks for it before believing one, hears of it.
        """
        try:
            asked = [Find(key) for key, _ in items]
            outcomes = self._again(lambda: self.store.acquire(request, asked))
            are_there = [
                outcome.handle == handle
                for outcome, (_, handle) in zip(outcomes, items, strict=True)
            ]
            for (key, _), is_there in zip(items, are_there, strict=True):
                if not is_there:
                    self.disown(key)
        except AfferentError as error:  # who made the references has lost them likewise
            log.warning("features could not be looked for: %s", error.code)
            return [False] * len(items)
        return are_there

    def disown(self, key: bytes) -> None:
        """Nobody finds these features any more, nor believes what was made of them."""
        self._again(lambda: self.store.delete([key]))

    def view(self, handle: Handle) -> Any:
        """The tree of an item's features as tensors over the arena, of an item that is pinned:
        what is taken out of it must be copied, and the tree let go, before it is not.

        Raises:
            Gone: The store was started again meanwhile.
        """
        try:
            return codec.view(self.store.block(handle), tensors="torch")
        except (StoreRestarted, StaleHandle) as error:
            raise Gone("the store was started again") from error

    def capacity_nbytes(self, kind: ObjectKind) -> int:
        """How much of the arena a kind may take; 0 if nobody says."""
        try:
            return self.store.stat().kinds[kind].capacity_nbytes
        except AfferentError:
            return 0

    def raw(self, handle: Handle, start: int, nbytes: int) -> bytes:
        """A copy of an item's bytes.

        Raises:
            Gone: They are not there any more.
        """
        with self.request("bytes") as request:
            try:
                self._again(lambda: self.store.get(request, [handle]))
                return bytes(self.store.block(handle)[start : start + nbytes])
            except AfferentError as error:
                raise Gone("the item's bytes are gone") from error

    def close(self) -> None:
        self.store.close()

    def _again(self, call: Any) -> Any:
        """A call that outlives a restart of the store; whoever made a reference before that knows
        by itself that it leads nowhere.

        Raises:
            StoreUnavailable: The store does not come back.
        """
        deadline = time.monotonic() + _RECONNECT_TIMEOUT_S
        while True:
            try:
                return call()
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)


_lock = threading.Lock()
_arenas: dict[str, Arena] = {}


def arena(name: str) -> Arena:
    """This process's own.

    Args:
        name: Who it is: ``api`` or ``worker``.

    Raises:
        StoreUnavailable: No server is there.
        ConfigError: Nothing says where it is.
    """
    with _lock:
        if name not in _arenas:
            _arenas[name] = _connect(name)
        return _arenas[name]


def _connect(name: str) -> Arena:
    where = place.find()
    if where is None:
        raise ConfigError(f"{place.STORE} is not set")
    log.info("reading from the arena at %s", where.address)
    return Arena(where, name=name)
