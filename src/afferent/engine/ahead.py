"""Embeddings that others have made, brought into the arena before an engine looks for them there.

They may be in a tier, where another node has left them. Whoever accepts a request has them fetched;
the engine looks for embeddings as ever, and encodes what is not there. So nothing ever depends on
this, and no process of an engine talks to a network.

An encoder of an engine that is not ours says in the store which one it is (`announce`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.errors import AfferentError
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.store import Store
from afferent.store.protocol.items import Claim, Fetch, Find, SealItem
from afferent.types import ContentKey, KeyBytes, KiB, NonNegative, ObjectKind, Span, decode, encode

log = logging.getLogger(__name__)

LONGEST_FETCH_S: Final = 10.0
"""Who has waited for so long goes on without: the tier has its own, shorter limits."""
_BESIDE_ROWS_NBYTES = 16 * KiB
"""What a block of embeddings has beside its rows."""
_ENCODE_ROW_US = 50
"""About what an encoder takes for a row, until one has been measured by what talks to the tier."""
_LOOK_AGAIN_S = 1.0
_RECORD: Final = ContentKey(keys.frame(b"afferent/encoder/v1"))
_MAX_RECORD_NBYTES = 64


class Encoder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Whose embeddings.

    Attributes:
        weights: Digest of all that shapes them besides an item's features.
        row_nbytes: Of one row, the layers that go with it included.
    """

    weights: KeyBytes
    row_nbytes: NonNegative


_decoder = msgspec.msgpack.Decoder(Encoder)


def announce(store: Store, encoder: Encoder, *, is_first: bool) -> None:
    """Say in a store, which may have been started again, whose embeddings are looked for there.

    Args:
        store: Writable.
        encoder: This process's.
        is_first: Another one that is named there is no more.

    Raises:
        AfferentError: It can't be said now.
    """
    request = "encoder"
    try:
        (outcome,) = store.acquire(request, [Find(_RECORD)])
        if outcome.handle is not None:
            if not is_first or decode(_decoder, store.block(outcome.handle)) == encoder:
                return
            store.delete([_RECORD])
        (outcome,) = store.acquire(
            request, [Claim(_RECORD, ObjectKind.RECORDS, _MAX_RECORD_NBYTES)]
        )
        if outcome.state == "owner" and outcome.handle is not None:
            data = encode(encoder)
            store.block(outcome.handle)[: len(data)] = data
            store.seal(request, [SealItem(outcome.handle, len(data))])
    finally:
        store.forget(request)


class Ahead:
    """Has embeddings fetched, for one process that accepts requests."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store = store
        self._numbers = itertools.count()
        self._announced: Encoder | None = None
        self._looked_s = float("-inf")

    async def fetch_announced(self, num_rows: Mapping[ContentKey, int]) -> list[Span]:
        """`fetch`, for the encoder that is announced; nothing, while none is."""
        lease = self._new_lease()
        try:
            encoder = await self._find_announced(lease)
            return [] if encoder is None else await self._fetch(lease, num_rows, encoder)
        except AfferentError as error:
            log.info("embeddings were not fetched", extra={"reason": error.code})
            return []
        finally:
            self._store.forget(lease)

    async def fetch(self, num_rows: Mapping[ContentKey, int], encoder: Encoder) -> list[Span]:
        """Wait until what others have of these items' embeddings is here, if it comes in time.

        It never fails: what does not come is encoded.

        Args:
            num_rows: Of each item, by the key of its features.
            encoder: Whose embeddings.

        Returns:
            What was done for it.
        """
        lease = self._new_lease()
        try:
            return await self._fetch(lease, num_rows, encoder)
        except AfferentError as error:
            log.info("embeddings were not fetched", extra={"reason": error.code})
            return []
        finally:
            self._store.forget(lease)

    # Inner steps

    def _new_lease(self) -> str:
        return f"ahead-{next(self._numbers)}"

    async def _fetch(
        self, lease: str, num_rows: Mapping[ContentKey, int], encoder: Encoder
    ) -> list[Span]:
        wanted = [
            Fetch(
                keys.embeddings_key(item=key, weights=encoder.weights),
                ObjectKind.EMBEDDINGS,
                number * encoder.row_nbytes + _BESIDE_ROWS_NBYTES,
                max(1, number * _ENCODE_ROW_US),
            )
            for key, number in num_rows.items()
        ]
        outcomes = await self._store.acquire(lease, wanted)
        coming = [
            item.key
            for item, outcome in zip(wanted, outcomes, strict=True)
            if outcome.state in ("scheduled", "in_flight")
        ]
        if not coming:
            return []
        came = await self._store.wait(lease, coming, timeout_s=LONGEST_FETCH_S)
        return [span for outcome in came for span in outcome.spans]

    async def _find_announced(self, lease: str) -> Encoder | None:
        """As it was said last; nobody is asked again within a second."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = now_s
            (outcome,) = await self._store.acquire(lease, [Find(_RECORD)])
            if outcome.handle is not None:
                self._announced = decode(_decoder, self._store.block(outcome.handle))
        return self._announced
