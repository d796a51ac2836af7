"""Traits of vLLM among the HTTP servers, and its statistics, from the metrics pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from afferent.engines.http_upstream.client import ServerTraits
from afferent.engines.upstream import UpstreamStats
from afferent.engines.vllm.media import ItemHashes, TakenMedia
from afferent.types import Modality

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_KV_IN_USE: Final = "vllm:kv_cache_usage_perc"
_PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
_TOKENS: Final = "vllm:generation_tokens_total"
_NAMES: Final = tuple(
    name + end
    for name in (_RUNNING, _WAITING, _KV_IN_USE, _PROMPT_TOKENS, _TOKENS)
    for end in ("{", " ")
)
"""Beginnings of the lines that are parsed. The rest of a page is hundreds of lines, which are
skipped.
"""


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


def stats_of(pages: Sequence[bytes]) -> UpstreamStats | None:
    """Return the statistics of all servers together; ``None`` where none reports its running
    requests.
    """
    samples = list(itertools.chain.from_iterable(map(_samples, pages)))
    values: dict[str, list[float]] = {}
    for sample in samples:
        values.setdefault(sample.name, []).append(sample.value)
    if _RUNNING not in values:
        return None
    return UpstreamStats(
        num_running=round(sum(values[_RUNNING])),
        num_waiting=round(sum(values.get(_WAITING, ()))),
        kv_in_use=max(values.get(_KV_IN_USE, [0.0])),
        num_prompt_tokens=round(sum(values.get(_PROMPT_TOKENS, ()))),
        num_tokens=round(sum(values.get(_TOKENS, ()))),
    )


def _samples(page: bytes) -> Iterator[Sample]:
    lines = [line for line in page.decode(errors="replace").splitlines() if line.startswith(_NAMES)]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            yield from (each for each in family.samples if math.isfinite(each.value))
    except ValueError:  # not a page of metrics
        return
