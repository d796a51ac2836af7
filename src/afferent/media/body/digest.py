"""Digests of a request's media, in a thread for large media."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from afferent import keys

Bytes = bytes | memoryview

_WORTH_A_THREAD_NBYTES = 1 << 20
"""The hand-over to a thread costs as much as the hash of half a megabyte."""


class Digester:
    """Hashes many items at once, in a thread beside the event loop; hashing releases the GIL."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digest")

    async def digest_all(self, media: Sequence[Bytes]) -> list[bytes]:
        """Return `afferent.keys.digest` of each item; large items do not block the event loop."""
        return await self.apply(keys.digest, media)

    async def apply(self, digest: Callable[[Bytes], bytes], media: Sequence[Bytes]) -> list[bytes]:
        """Return the digests of all items by a function; large items do not block the loop."""
        total = sum(map(len, media))
        if total < _WORTH_A_THREAD_NBYTES:
            return _each(digest, media)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _each, digest, media)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _each(digest: Callable[[Bytes], bytes], media: Sequence[Bytes]) -> list[bytes]:
    return [digest(data) for data in media]
