"""Reading what references lead to. A process has one store, connected when it is first needed."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from afferent.engine.references import Reference, verify
from afferent.errors import (
    ConfigError,
    FormatError,
    StaleHandle,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import Find
from afferent.types import Handle
from afferent.engine.vllm import place

log = logging.getLogger("vllm.afferent")

_RECONNECT_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.02


class Gone(Exception):
    """What a reference led to is there no more."""


class Arena:
    """The store, as a process of vLLM sees it."""

    def __init__(self, where: place.Place, *, name: str) -> None:
        self._where = where
        self._store = DaemonStore(where.address, name=f"vllm {name} {os.getpid()}")
        self._secret = where.secret()
        self._reads = itertools.count()

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

    @contextmanager
    def features(self, key: bytes, handle: Handle) -> Iterator[Any]:
        """The tree of an item's features as tensors over the arena, valid within the context: what
        is taken out of it must be copied, and its arrays let go, before the end.

        Raises:
            Gone: They are not there any more, under this key in this place. The store has been
                told, so that who waits for an answer from them hears of it.
        """
        request = f"read-{next(self._reads)}"
        self._pin(request, key, handle)
        try:
            block = self._store.block(handle)
            yield codec.view(block, tensors="torch")
            del block
        except (StoreRestarted, StoreUnavailable) as error:
            raise Gone("the store was started again") from error
        finally:
            self._store.forget(request)

    def raw(self, handle: Handle, start: int, nbytes: int) -> bytes:
        """A copy of an item's bytes.

        Raises:
            Gone: They are not there any more.
        """
        request = f"read-{next(self._reads)}"
        try:
            self._again(lambda: self._store.get(request, [handle]))
            return bytes(self._store.block(handle)[start : start + nbytes])
        except (StaleHandle, StoreRestarted, StoreUnavailable) as error:
            raise Gone("the item's bytes are gone") from error
        finally:
            self._store.forget(request)

    def close(self) -> None:
        self._store.close()

    def _pin(self, request: str, key: bytes, handle: Handle) -> None:
        try:
            (found,) = self._again(lambda: self._store.acquire(request, [Find(key)]))
            if found.handle == handle:
                return
            self._store.forget(request)
            # Whoever made the reference looks for this before it believes an answer.
            self._again(lambda: self._store.delete([key]))
        except (StaleHandle, StoreRestarted) as error:
            raise Gone("the features are gone") from error
        raise Gone("the features are gone")

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


@functools.cache
def arena(name: str) -> Arena:
    """This process's own.

    Args:
        name: Who it is: ``api`` or ``worker``.

    Raises:
        StoreUnavailable: No server is there.
        ConfigError: Nothing says where it is.
    """
    where = place.find()
    if where is None:
        raise ConfigError(f"{place.STORE} is not set")
    log.info("reading from the arena at %s", where.shown)
    return Arena(where, name=name)
