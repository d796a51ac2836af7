"""How much running requests may hold in the KV cache: said in tokens, or as memory.

How many tokens fit into the memory is known when the model is. One request may have no more than
all may have, and the core's scheduler keeps all of them within it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from afferent.engine.protocol import EngineInfo
from afferent.engine.reference.settings import ReferenceSettings
from afferent.types import MiB

_LEAST_NBYTES = 64 * MiB


class KvBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For all workers together; ``num_tokens`` 0: as many as fit into ``nbytes``, and without those
    there is no limit.
    """

    num_tokens: int = 0
    nbytes: int = 0

    def tokens_for(self, info: EngineInfo) -> int | None:
        """Tokens that requests to this model may hold in all; ``None``: no limit."""
        if self.num_tokens:
            return self.num_tokens
        if not self.nbytes or not info.kv_token_nbytes:
            return None
        return max(1, self.nbytes // info.kv_token_nbytes)

    def bounded(self, info: EngineInfo) -> EngineInfo:
        """A request to this model is no longer than there is room for."""
        num_tokens = self.tokens_for(info)
        if num_tokens is None or num_tokens >= info.max_model_len:
            return info
        return msgspec.structs.replace(info, max_model_len=num_tokens)


def kv_budget(settings: ReferenceSettings, *, left_nbytes: int, weights_nbytes: int) -> KvBudget:
    """As the settings say, or half of the memory that is left beside the weights, which each worker
    loads; the other half is for what a step computes.

    It is the machine's memory that is divided here. Whose workers have their own, on GPUs, says
    how many tokens there is room for.
    """
    if settings.kv_cache_tokens:
        return KvBudget(num_tokens=settings.kv_cache_tokens)
    left_nbytes -= settings.tensor_parallel_size * weights_nbytes
    return KvBudget(nbytes=max(left_nbytes // 2, _LEAST_NBYTES))
