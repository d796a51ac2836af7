"""Quarantine of items for which an engine's encoder fails: each would end the engine again.

A record in the store, for an hour. The engine fails the requests of such an item before it encodes
anything, and the frontend then tells their clients the reason.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from afferent import keys
from afferent.errors import AfferentError
from afferent.store.block import codec
from afferent.store.client.store import Store
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import existing
from afferent.types import ContentKey, ObjectKind

log = logging.getLogger(__name__)

_TAG: Final = b"afferent/quarantine/v2"  # by the fields of a record
_LENGTH_S: Final = 3600.0
_REQUEST: Final = "quarantine"


def record_key(key: bytes) -> ContentKey:
    """Return the key of the record about an item.

    Args:
        key: The key of the item's features.
    """
    return keys.frame(_TAG, key)


def put(store: Store, key: bytes, *, engine: str, is_certain: bool) -> None:
    """Put an item into quarantine, if the store takes a record now.

    Args:
        store: A writable store.
        key: The key of the item's features.
        engine: Name of the engine, a new one after each start: all its ranks report one failure.
        is_certain: Whether the item alone is the cause; otherwise it needs two failures.
    """
    record = record_key(key)
    try:
        (outcome,) = store.acquire(_REQUEST, [Find(record)])
        handle = existing(outcome)
        holds, now_s = is_certain, time.time()
        if handle is not None and (before := _read(store.block(handle)))["until_s"] > now_s:
            holds |= before["holds"] or before["engine"] != engine
        store.delete([record])
        tree: codec.Tree = {"until_s": now_s + _LENGTH_S, "holds": holds, "engine": engine}
        store.put(_REQUEST, tree, kind=ObjectKind.RECORDS, key=record)
    except AfferentError as error:
        log.warning("an item could not be put into quarantine: %s", error.code)
    finally:
        store.forget(_REQUEST)


def is_active(record: memoryview) -> bool:
    """Whether a record keeps its item in quarantine now.

    Args:
        record: The record, pinned.

    Raises:
        FormatError: It is no record.
    """
    tree = _read(record)
    return bool(tree["holds"]) and float(tree["until_s"]) > time.time()


def _read(record: memoryview) -> Any:
    return codec.view(record)
