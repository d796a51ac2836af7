"""The content that clients of a storm write and verify, and the log to which they report."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from afferent.errors import DeadlineExceeded, StoreRestarted, StoreUnavailable
from afferent.store.protocol.items import Claim, Join, Queue, Wanted
from afferent.types import ContentKey, Handle, ObjectKind

NUM_KEYS = 400
ITEMS = [ContentKey(hashlib.sha256(b"item %d" % number).digest()) for number in range(200)]
RETRYABLE = (StoreUnavailable, StoreRestarted, DeadlineExceeded)


class Corrupt(Exception):
    """The bytes that a client has read are not the bytes that were written."""


class Log:
    """Lines ``PID EVENT VALUE`` in a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._num_reads = 0

    def __call__(self, event: str, value: object = "") -> None:
        # One write to a file in append mode: the line is complete even if the process is killed.
        os.write(self._fd, f"{os.getpid()} {event} {value}\n".encode())

    def count_read(self) -> None:
        self._num_reads += 1
        if self._num_reads % 20 == 0:
            self("read", 20)


@lru_cache(600)
def content_of(key: bytes) -> NDArray[np.uint8]:
    """Return the content for a key: 1 to 256 KiB that begin with the key."""
    rng = np.random.default_rng(int.from_bytes(key[:8]))
    content = rng.integers(0, 256, int(1024 * 2 ** rng.uniform(0, 8)), np.uint8)
    content[:32] = np.frombuffer(key, np.uint8)
    return content


def nbytes_of(key: bytes) -> int:
    return len(content_of(key))


def check_content(array: NDArray[np.uint8], key: bytes | None = None) -> None:
    """Compare every byte with the content for the key at the beginning of the array.

    Raises:
        Corrupt: A byte differs, or the array begins with another key than ``key``.
    """
    found = array[:32].tobytes()
    if not np.array_equal(array, content_of(found)):
        raise Corrupt(f"{len(array)} bytes under {found.hex()}")
    if key is not None and found != key:
        raise Corrupt(f"{found.hex()} in place of {key.hex()}")


def some_keys(rng: random.Random, count: int) -> list[ContentKey]:
    numbers = rng.sample(range(NUM_KEYS), count)
    return [ContentKey(hashlib.sha256(b"%d" % number).digest()) for number in numbers]


def acquire_items(
    keys: Sequence[ContentKey], kind: ObjectKind, make: str | None, inputs: Sequence[Handle] = ()
) -> list[Wanted]:
    """Return requests for keys; ``make`` is ``"job"``, ``"self"`` or ``None``."""
    items: list[Wanted] = []
    for key in keys:
        match make:
            case "job":
                items.append(Queue(key, kind, nbytes_of(key), list(inputs), key))
            case "self":
                items.append(Claim(key, kind, nbytes_of(key)))
            case _:
                items.append(Join(key))
    return items
