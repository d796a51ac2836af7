"""Traits of vLLM among the HTTP servers."""

from __future__ import annotations

from collections.abc import Sequence

from afferent.engines.http_upstream.client import ServerTraits
from afferent.engines.upstream import UpstreamStats
from afferent.engines.vllm.figures import stats_of
from afferent.engines.vllm.media import ItemHashes, TakenMedia
from afferent.types import Modality


class VllmTraits(ServerTraits):
    """Traits of vLLM."""

    def __init__(self, taken: TakenMedia, hashes: ItemHashes | None) -> None:
        self._taken = taken
        self.takes_any_file = taken.any_file
        self.takes_videos = taken.video_files
        self.name_of = None if hashes is None else hashes.name_of

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        return self._taken.takes(modality, file)

    def stats_of(self, pages: Sequence[bytes]) -> UpstreamStats | None:
        return stats_of(pages)
