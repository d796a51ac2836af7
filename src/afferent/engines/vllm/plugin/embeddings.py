"""Embeddings by content: other workers, and restarted ones, find the embeddings that a worker
encoded.

The embeddings are in the arena, under the item's key and a digest of everything else that shapes
them: weights, dtype, vLLM's version. Readers copy them, so that nothing stays pinned. The worker
announces the digest, so that frontends can fetch the embeddings of other machines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from afferent import keys
from afferent.engines.ahead import Encoder, announce
from afferent.engines.vllm.plugin.arena import Arena
from afferent.engines.vllm.plugin.features import folder_of
from afferent.engines.weights import weights_digest
from afferent.errors import AfferentError, ConfigError, DeadlineExceeded
from afferent.store.block import torch_tensors
from afferent.store.client.item_cache import ItemCache
from afferent.types import ContentKey, Handle, ObjectKind

log = logging.getLogger("vllm.afferent")

_TAG = b"afferent/vllm-embeddings/v1"


_ANNOUNCE_EVERY_S = 1.0
_SILENT_S = 5.0
"""Pause after a call that the store did not answer: a step waits for each."""


class KeptEmbeddings:
    """Embeddings in the arena, for one model as it runs here.

    Invariants:
        - ``_cache`` is ``None`` until the weights' digest is known; then it never changes.
        - No embedding stays pinned after `find`: results are copies.
        - Only a worker with ``publishes`` writes embeddings and announces the encoder.
    """

    def __init__(
        self,
        arena: Arena,
        model_config: Any,
        *,
        publishes: bool,
        row_nbytes: Callable[[], int],
    ) -> None:
        """Begin to compute the weights' digest in a thread, if the arena has space for embeddings.

        Args:
            arena: This process's arena.
            model_config: vLLM's.
            publishes: Whether this worker writes embeddings for others; one of a group is enough.
            row_nbytes: Returns the length of a row, as far as it is known by then.
        """
        self._arena, self._model_config, self._publishes = arena, model_config, publishes
        self._row_nbytes = row_nbytes
        self._cache: ItemCache | None = None
        """``None`` while the weights' digest is not known, or if there is no room."""
        self._silent_until_s = 0.0
        if arena.capacity_nbytes(ObjectKind.EMBEDDINGS) > 0:
            # The digest reads all weights, which takes seconds for large ones.
            threading.Thread(target=self._begin, name="afferent-digest", daemon=True).start()

    def find(self, wanted: Sequence[ContentKey], device: torch.device) -> list[torch.Tensor | None]:
        """Return private copies of the embeddings that exist, ``(num_embeds, width)`` each."""
        if self._cache is None or not wanted or time.monotonic() < self._silent_until_s:
            return [None] * len(wanted)
        with self._arena.request("embeddings") as request:
            try:
                trees: Mapping[ContentKey, Any] = self._cache.get_embeddings(request, wanted)
            except AfferentError as error:
                log.info("embeddings were not looked for: %s", error.code)
                if isinstance(error, DeadlineExceeded):
                    self._silent_until_s = time.monotonic() + _SILENT_S
                return [None] * len(wanted)
            copies = {
                key: torch_tensors.as_tensor(tree["rows"].copy()).to(device)
                for key, tree in trees.items()
            }
            del trees
        return [copies.get(key) for key in wanted]

    def publish(
        self,
        made: Mapping[ContentKey, tuple[Handle, torch.Tensor]],
        *,
        start_s: float,
    ) -> None:
        """Write embeddings for other processes; lack of space is no failure.

        Args:
            made: The features' handle, and the embeddings, by the item's key.
            start_s: `time.monotonic` at the start of their computation. On a device they are ready
                when they have been copied; the time is divided by rows.
        """
        if self._cache is None or not self._publishes or not made:
            return
        if time.monotonic() < self._silent_until_s:
            return
        with self._arena.request("publish") as request:
            if self._arena.pin_blocks(request, [handle for handle, _ in made.values()]):
                self._write(self._cache, request, made, start_s=start_s)

    def _write(
        self,
        cache: ItemCache,
        request: str,
        made: Mapping[ContentKey, tuple[Handle, torch.Tensor]],
        *,
        start_s: float,
    ) -> None:
        copies = {key: rows.detach().cpu() for key, (_, rows) in made.items()}
        num_rows = max(1, sum(map(len, copies.values())))
        row_us = 1e6 * (time.monotonic() - start_s) / num_rows
        try:
            cache.set_embeddings(
                request,
                {key: {"rows": rows} for key, rows in copies.items()},
                computed_from={key: handle for key, (handle, _) in made.items()},
                made_us={key: max(1, round(row_us * len(rows))) for key, rows in copies.items()},
            )
        except AfferentError as error:
            log.info("embeddings were not stored: %s", error.code)

    def _begin(self) -> None:
        config = self._model_config
        try:
            files = weights_digest(folder_of(config))
        except (ConfigError, OSError):
            log.warning(
                "embeddings are not shared: %s holds no weights that are known", config.model
            )
            return
        shaped_by = (config.dtype, config.quantization, metadata.version("vllm"))
        weights = keys.frame(_TAG, files, repr(shaped_by).encode())
        self._cache = ItemCache(self._arena.store, weights=weights)
        if self._publishes:
            self._announce(weights)

    def _announce(self, weights: bytes) -> None:
        """Announce the encoder for as long as the process lives: the store may restart, or evict
        it.
        """
        said = None
        while True:
            encoder = Encoder(weights, self._row_nbytes())
            try:
                announce(self._arena.store, encoder, is_first=encoder != said)
                said = encoder
            except AfferentError as error:  # the store is away, or has no space now
                log.debug("the encoder was not announced: %s", error.code)
            time.sleep(_ANNOUNCE_EVERY_S)
