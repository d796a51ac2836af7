"""Access to the blocks of references. A process has one store, connected at its first use."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from afferent.admission.permits import GATE
from afferent.engines import place
from afferent.engines.references import Of, Reference, out_of_reach, verify
from afferent.engines.vllm.plugin.arrivals import Arrivals, Step
from afferent.errors import (
    AfferentError,
    ConfigError,
    FormatError,
    StaleHandle,
    StoreError,
    StoreRestarted,
    StoreUnavailable,
    Unavailable,
)
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import existing
from afferent.types import Handle, ObjectKind

log = logging.getLogger("vllm.afferent")

_RECONNECT_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.02
_LONGEST_CALLS_S = {"worker-embeddings": 0.25}
"""Limits of calls for which a step waits and which it can do without."""


class Gone(Exception):
    """The object of a reference no longer exists."""


@contextmanager
def told_to_the_client(url: str) -> Iterator[None]:
    """Convert errors of a reference into errors that vLLM sends to the client.

    vLLM knows no other kind: of any other error, it would close the connection after its answer.

    Raises:
        ValueError: The reference is invalid, or, with `out_of_reach`, can't be read at the moment.
    """
    try:
        yield
    except FormatError as error:
        raise ValueError(f"this server takes media from Afferent only: {error}") from error
    except (Unavailable, ConfigError) as error:  # no secret, while the server is started again
        raise ValueError(f"{out_of_reach(url)}: {error}") from error
    except (Gone, AfferentError) as error:
        raise ValueError(f"the media are not there any more: {error}") from error


class Arena:
    """Store as a process of vLLM sees it.

    Invariants:
        - Each `request` has its own name, and all its pins are released at its end.
        - Only a worker's stores are writable.
        - ``_arrivals`` and ``_processed`` are used under ``_arrivals_lock`` only.
    """

    def __init__(self, where: place.Place, *, name: str) -> None:
        self._where = where
        self.store = DaemonStore(
            where.address,
            name=f"vllm {name} {os.getpid()}",
            writable=name.startswith("worker"),
            longest_call_s=_LONGEST_CALLS_S.get(name),
        )
        self._secret = where.secret()
        self._requests = itertools.count()
        self._arrivals, self._processed = Arrivals(), Arrivals()
        self._arrivals_lock = threading.Lock()

    def verify(self, url: str) -> Reference:
        """Return the reference of a URL.

        Raises:
            FormatError: It is no reference of the server as it runs now.
        """
        try:
            return verify(url, self._secret)
        except FormatError:
            self._secret = self._where.secret()  # the server may have been started again
            return verify(url, self._secret)

    def admit(self, of: Of, *, is_processed: bool) -> None:
        """Check that the request of a reference still exists; a request that ended has lost its
        media.

        Args:
            is_processed: Whether the engine has nothing to process once it has all references: the
                request then leaves the gate.

        Raises:
            Gone: The request has ended.
            Unavailable: The store does not answer, or was started again.
        """
        with self._arrivals_lock:
            step = self._arrivals.note(of)
        if step is Step.NOTHING:
            return
        left = GATE if step is Step.LAST and is_processed else ()
        if not self._again(lambda: self.store.accept(of.request, left)):
            raise Gone("the request that they belong to has ended")

    def leave(self, processed: Iterable[Of]) -> None:
        """Count items that the engine has processed; a request leaves the gate with its last item.

        A request with several prompts is processed in several parts.
        """
        for of in processed:
            with self._arrivals_lock:
                step = self._processed.note(of)
            if step is Step.LAST:
                self.store.accepted(of.request, GATE)

    @contextmanager
    def request(self, what: str) -> Iterator[str]:
        """Yield a name for pins; all pins under it are released at the end of the context."""
        request = f"{what}-{next(self._requests)}"
        try:
            yield request
        finally:
            self.store.forget(request)

    def pin(self, request: str, items: Sequence[tuple[bytes, Handle]]) -> list[bool]:
        """Pin features, given by key and handle; return whether each exists.

        Features that do not match their handle are deleted. A process that waits for an answer from
        them, and looks them up before it trusts the answer, then notices the loss.
        """
        try:
            asked = [Find(key) for key, _ in items]
            outcomes = self._again(lambda: self.store.acquire(request, asked))
            are_there = [
                existing(outcome) == handle
                for outcome, (_, handle) in zip(outcomes, items, strict=True)
            ]
            for (key, _), is_there in zip(items, are_there, strict=True):
                if not is_there:
                    self.disown(key)
        except AfferentError as error:  # the frontend of the references has lost them likewise
            log.warning("features could not be looked for: %s", error.code)
            return [False] * len(items)
        return are_there

    def pin_blocks(self, request: str, handles: Sequence[Handle]) -> bool:
        """Pin blocks, and return whether all of them could be pinned."""
        try:
            self.store.get(request, handles)
        except AfferentError as error:
            log.info("features were not pinned: %s", error.code)
            return False
        return True

    def disown(self, key: bytes) -> None:
        """Delete these features, so that no process finds them or trusts results made from them."""
        self._again(lambda: self.store.delete([key]))

    def view(self, handle: Handle) -> Any:
        """Return the tree of a pinned item's features as tensors over the arena.

        Copy the needed tensors, and drop the tree, before the item is unpinned.

        Raises:
            Gone: The store was restarted meanwhile.
        """
        try:
            return codec.view(self.store.block(handle), tensors="torch")
        except (StoreRestarted, StaleHandle) as error:
            raise Gone("the store was started again") from error

    def capacity_nbytes(self, kind: ObjectKind) -> int:
        """Return the capacity of a kind in the arena; 0 if the store does not answer."""
        try:
            return self.store.stat().kinds[kind].capacity_nbytes
        except AfferentError:
            return 0

    def raw(self, handle: Handle, start: int, nbytes: int) -> bytes:
        """Return a copy of an item's bytes.

        Raises:
            Gone: They no longer exist.
            Unavailable: The store does not answer, or was started again.
        """
        with self.request("bytes") as request:
            try:
                self._again(lambda: self.store.get(request, [handle]))
                return bytes(self.store.block(handle)[start : start + nbytes])
            except StoreError as error:
                raise Gone("the item's bytes are gone") from error

    def close(self) -> None:
        self.store.close()

    def _again(self, call: Any) -> Any:
        """Repeat a call that must outlive a restart of the store.

        The process that made a reference before the restart knows by itself that it is invalid.

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
    """Return this process's own arena.

    Args:
        name: The process's role: ``api`` or ``worker``; ``worker-embeddings`` for a connection
            without long waits.

    Raises:
        StoreUnavailable: No server is there.
        ConfigError: The environment does not name the store.
    """
    with _lock:
        if name not in _arenas:
            _arenas[name] = _connect(name)
        return _arenas[name]


def _connect(name: str) -> Arena:
    where = place.required_store()
    log.info("reading from the arena at %s", where.address)
    return Arena(where, name=name)
