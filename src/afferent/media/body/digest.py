"""Digests of a request's media, on several threads for large media."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from afferent import keys

Bytes = bytes | memoryview

_WORTH_A_THREAD_NBYTES = 1 << 20
"""The hand-over to a thread costs as much as the hash of half a megabyte."""


class Digester:
    """Hashes many items at once; hashing releases the GIL.

    Args:
        num_workers: Threads beside the caller's; 0 hashes the items one after another, in the
            caller's thread.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._threads = (
            ThreadPoolExecutor(num_workers, thread_name_prefix="digest") if num_workers else None
        )

    async def digest_all(self, media: Sequence[Bytes]) -> list[bytes]:
        """Return `afferent.keys.digest` of each item; large items do not block the event loop."""
        return await self.apply(keys.digest, media)

    async def apply(self, digest: Callable[[Bytes], bytes], media: Sequence[Bytes]) -> list[bytes]:
        """Return the digests of all items by a function; large items do not block the loop."""
        total = sum(map(len, media))
        if self._threads is None or total < _WORTH_A_THREAD_NBYTES:
            return [digest(data) for data in media]
        loop = asyncio.get_running_loop()
        stripes = stripe(media, max(1, min(self._num_workers, total // _WORTH_A_THREAD_NBYTES)))
        done = await asyncio.gather(
            *(loop.run_in_executor(self._threads, _each, digest, part) for part in stripes)
        )
        digests = [b""] * len(media)
        for start, part in enumerate(done):
            digests[start :: len(stripes)] = part
        return digests

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def stripe(items: Sequence[Bytes], num_parts: int) -> list[Sequence[Bytes]]:
    """Return the items in stripes: part ``i`` holds items ``i``, ``i + num_parts``, ..."""
    return [items[start::num_parts] for start in range(min(num_parts, len(items)))]


def _each(digest: Callable[[Bytes], bytes], media: Sequence[Bytes]) -> list[bytes]:
    return [digest(data) for data in media]
