"""Embeddings by content: other workers, and restarted ones, find the embeddings that a worker
encoded.

The embeddings are in the arena, under the item's key and a digest of everything else that shapes
them: weights, dtype, vLLM's version. Readers copy them, so that nothing stays pinned. The worker
announces the digest, so that frontends can fetch the embeddings of other machines.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from afferent import keys
from afferent.engines.ahead import Encoder, announce
from afferent.engines.vllm.plugin.arena import Arena
from afferent.engines.vllm.plugin.features import folder_of
from afferent.engines.vllm.plugin.pause import Pause
from afferent.engines.vllm.plugin.transfer import Download, Stopwatch, upload
from afferent.engines.weights import weights_digest
from afferent.errors import AfferentError, ConfigError, DeadlineExceeded
from afferent.media.families import mistral
from afferent.store.block import torch_tensors
from afferent.store.client.item_cache import ItemCache
from afferent.types import ContentKey, Handle, MiB, ObjectKind

log = logging.getLogger("vllm.afferent")

_TAG = b"afferent/vllm-embeddings/v1"


_ANNOUNCE_EVERY_S = 1.0
_UNWRITTEN_NBYTES = 64 * MiB
"""Embeddings that may wait for the thread that writes them; those beyond are not shared."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Embeddings on their way to the arena."""

    keys: Sequence[ContentKey]
    handles: Sequence[Handle]
    copies: Download
    nbytes: int


class KeptEmbeddings:
    """Embeddings in the arena, for one model as it runs here.

    Invariants:
        - ``_cache`` is ``None`` until the weights' digest is known; then it never changes.
        - No embedding stays pinned after `find`: results are copies.
        - Only a worker with ``publishes`` writes embeddings and announces the encoder.
        - A thread writes them: no step waits for the device or for the store to have them.
        - What is computed from features that are gone when it is written is not written.
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
        self._pause = Pause()
        """After a call that the store did not answer in time: a step waits for each lookup."""
        self._unwritten: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten_nbytes = 0
        """Bytes of the embeddings that are queued or being written; used under the lock."""
        if arena.capacity_nbytes(ObjectKind.EMBEDDINGS) > 0:
            # The digest reads all weights, which takes seconds for large ones.
            threading.Thread(target=self._begin, name="afferent-digest", daemon=True).start()

    def find(self, wanted: Sequence[ContentKey], device: torch.device) -> list[torch.Tensor | None]:
        """Return private copies of the embeddings that exist, ``(num_embeds, width)`` each."""
        begun_s = time.monotonic()
        if self._cache is None or not wanted or not self._pause.is_over(begun_s):
            return [None] * len(wanted)
        with self._arena.request("embeddings") as request:
            try:
                trees: Mapping[ContentKey, Any] = self._cache.get_embeddings(request, wanted)
            except AfferentError as error:
                log.info("embeddings were not looked for: %s", error.code)
                if isinstance(error, DeadlineExceeded):
                    now_s = time.monotonic()
                    self._pause.begin(now_s, waited_s=now_s - begun_s)
                return [None] * len(wanted)
            self._pause.end()
            copies = {
                key: upload(torch_tensors.as_tensor(tree["rows"]), device)
                for key, tree in trees.items()
            }
            del trees
        return [copies.get(key) for key in wanted]

    def publish(
        self,
        made: Mapping[ContentKey, tuple[Handle, torch.Tensor]],
        started: Stopwatch,
    ) -> None:
        """Begin to write embeddings for other processes; lack of space is no failure.

        Args:
            made: The features' handle, and the embeddings, by the item's key.
            started: From before their computation began. The time is divided by rows.
        """
        if self._cache is None or not self._publishes or not made:
            return
        nbytes = sum(rows.nbytes for _, rows in made.values())
        with self._lock:
            if self._unwritten_nbytes + nbytes > _UNWRITTEN_NBYTES and self._unwritten_nbytes:
                return
        handles, rows = [each for each, _ in made.values()], [each for _, each in made.values()]
        try:
            copies = Download(rows, started)
        except Exception:  # page-locked memory, for example; the rows themselves are there
            log.exception("embeddings were not stored")
            return
        with self._lock:
            self._unwritten_nbytes += nbytes
        self._unwritten.put(_Made(list(made), handles, copies, nbytes))

    def _write_all(self, cache: ItemCache) -> None:
        while True:
            made = self._unwritten.get()
            try:
                self._write(cache, made)
            except Exception:  # of the device, for example, which the engine notices by itself
                log.exception("embeddings were not stored")
            with self._lock:
                self._unwritten_nbytes -= made.nbytes
            del made

    def _write(self, cache: ItemCache, made: _Made) -> None:
        computed_s = made.copies.wait()
        rows = made.copies.rows
        row_us = 1e6 * computed_s / max(1, sum(map(len, rows)))
        with self._arena.request("publish") as request:
            if not self._arena.pin_blocks(request, made.handles):
                return
            try:
                cache.set_embeddings(
                    request,
                    {key: {"rows": each} for key, each in zip(made.keys, rows, strict=True)},
                    computed_from=dict(zip(made.keys, made.handles, strict=True)),
                    made_us={
                        key: max(1, round(row_us * len(each)))
                        for key, each in zip(made.keys, rows, strict=True)
                    },
                )
            except AfferentError as error:
                log.info("embeddings were not stored: %s", error.code)

    def _begin(self) -> None:
        config = self._model_config
        try:
            folder = folder_of(config)
            own = mistral.digested_files(folder) if mistral.has_format(folder) else ()
            files = weights_digest(folder, own)
        except (ConfigError, OSError):
            log.warning(
                "embeddings are not shared: %s holds no weights that are known", config.model
            )
            return
        pruning = getattr(config.multimodal_config, "video_pruning_rate", None)
        shaped_by = (
            *(config.dtype, config.quantization, metadata.version("vllm")),
            *(getattr(config, "hf_overrides", None), pruning),
        )
        weights = keys.frame(_TAG, files, repr(shaped_by).encode())
        self._cache = cache = ItemCache(self._arena.store, weights=weights)
        if self._publishes:
            threading.Thread(
                target=self._write_all, args=(cache,), name="afferent-embeddings", daemon=True
            ).start()
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
