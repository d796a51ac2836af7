"""Embedding prefetcher: fetches embeddings into the arena before an engine looks them up there.

The embeddings may be in a tier, where another node has left them. The process that accepts a
request fetches them. The engine looks up embeddings as usual, and encodes missing ones. So nothing
depends on the prefetcher, and no process of an engine talks to a network.

The encoder of a plugged-in engine announces itself in the store (`announce`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.admission.shares import NAMELESS, Share
from afferent.errors import AfferentError
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.settle import settle
from afferent.store.client.store import Store
from afferent.store.protocol.items import Claim, Fetch, Find, ItemLabel, SealItem
from afferent.store.protocol.results import Owner, existing, spans_of
from afferent.types import ContentKey, KeyBytes, KiB, NonNegative, ObjectKind, Span, decode, encode

log = logging.getLogger(__name__)

LONGEST_FETCH_S: Final = 10.0
"""Longest wait of a request for its embeddings: the tier has its own, shorter limits."""
_BESIDE_ROWS_NBYTES = 16 * KiB
"""Upper bound of the bytes of a block of embeddings besides its rows."""
_ENCODE_ROW_US = 50
"""Approximate encoder time of a row, used until the tier process has measured one."""
_LOOK_AGAIN_S = 1.0
_RECORD: Final = ContentKey(keys.frame(b"afferent/encoder/v1"))
_MAX_RECORD_NBYTES = 64


class Encoder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Identity of an encoder, whose embeddings are looked up.

    Attributes:
        weights: Digest of everything that shapes the embeddings besides an item's features.
        row_nbytes: Bytes of one row, including its further layers.
    """

    weights: KeyBytes
    row_nbytes: NonNegative


_decoder = msgspec.msgpack.Decoder(Encoder)


def announce(store: Store, encoder: Encoder, *, is_first: bool) -> None:
    """Announce in a store, which may have been restarted, which encoder's embeddings are looked up.

    Args:
        store: A writable store.
        encoder: This process's encoder.
        is_first: Replace another encoder that is announced there.

    Raises:
        AfferentError: The encoder can't be announced now.
    """
    request = "encoder"
    try:
        (outcome,) = store.acquire(request, [Find(_RECORD)])
        if (handle := existing(outcome)) is not None:
            if not is_first or decode(_decoder, store.block(handle)) == encoder:
                return
            store.delete([_RECORD])
        (outcome,) = store.acquire(
            request, [Claim(_RECORD, ObjectKind.RECORDS, _MAX_RECORD_NBYTES)]
        )
        if isinstance(outcome, Owner):
            data = encode(encoder)
            store.block(outcome.handle)[: len(data)] = data
            store.seal(request, [SealItem(outcome.handle, len(data))])
    finally:
        store.forget(request)


class Ahead:
    """Embedding prefetcher of one process that accepts requests.

    Invariants:
        - Each fetch has its own lease, which is released at its end.
        - The announced encoder is looked up at most once a second.
    """

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store = store
        self._numbers = itertools.count()
        self._announced: Encoder | None = None
        self._looked_s = float("-inf")

    async def fetch(
        self,
        num_rows: Mapping[ContentKey, int],
        encoder: Encoder | None = None,
        *,
        names: Mapping[ContentKey, bytes] = MappingProxyType({}),
        share: Share = NAMELESS,
    ) -> list[Span]:
        """Fetch the embeddings of these items, and wait until they are here, within the time limit.

        It never fails: the engine encodes the items that did not come.

        Args:
            num_rows: Rows of each item, by the key of its features.
            encoder: The encoder of the embeddings; ``None`` for the announced one. Nothing is
                fetched while none is announced.
            names: Names of items in events and lookups, where they are not the keys.
            share: Share of the tenant that the items belong to.

        Returns:
            The spans of the fetches.
        """
        lease = f"ahead-{next(self._numbers)}"
        try:
            encoder = encoder or await self._find_announced(lease)
            if encoder is None:
                return []
            if share is not NAMELESS:
                self._store.introduce(lease, share)
            wanted = [
                Fetch(
                    keys.embeddings_key(item=key, weights=encoder.weights),
                    ObjectKind.EMBEDDINGS,
                    number * encoder.row_nbytes + _BESIDE_ROWS_NBYTES,
                    max(1, number * _ENCODE_ROW_US),
                    ItemLabel(name=names.get(key) or key),
                )
                for key, number in num_rows.items()
            ]
            outcomes = await self._store.acquire(lease, wanted)
            settled = await settle(
                *(self._store, lease, [ContentKey(each.key) for each in wanted], outcomes),
                timeout_s=LONGEST_FETCH_S,
            )
            return [span for outcome in settled for span in spans_of(outcome)]
        except AfferentError as error:
            log.info("embeddings were not fetched", extra={"reason": error.code})
            return []
        finally:
            self._store.forget(lease)

    async def _find_announced(self, lease: str) -> Encoder | None:
        """Return the announced encoder; the store is asked at most once a second."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = now_s
            (outcome,) = await self._store.acquire(lease, [Find(_RECORD)])
            if (handle := existing(outcome)) is not None:
                self._announced = decode(_decoder, self._store.block(handle))
        return self._announced
