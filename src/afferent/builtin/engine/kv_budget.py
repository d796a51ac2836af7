"""KV-cache budget of running requests, in tokens or in bytes.

The number of tokens that fit into the memory is known once the model is loaded. One request may
have at most the whole budget; the core's scheduler bounds the sum.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from afferent.builtin.engine.settings import ReferenceSettings
from afferent.engines.protocol import EngineInfo
from afferent.types import MiB

_LEAST_NBYTES = 64 * MiB


class KvBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budget of all workers together; ``num_tokens`` 0: as many as fit into ``nbytes``; both 0: no
    limit.
    """

    num_tokens: int = 0
    nbytes: int = 0

    def tokens_for(self, info: EngineInfo) -> int | None:
        """Return the most tokens of all requests to this model together; ``None``: no limit."""
        if self.num_tokens:
            return self.num_tokens
        if not self.nbytes or not info.kv_token_nbytes:
            return None
        return max(1, self.nbytes // info.kv_token_nbytes)

    def bounded(self, info: EngineInfo) -> EngineInfo:
        """Return the model's info with requests bounded by the budget."""
        num_tokens = self.tokens_for(info)
        if num_tokens is None or num_tokens >= info.max_model_len:
            return info
        return msgspec.structs.replace(info, max_model_len=num_tokens)


def kv_budget(settings: ReferenceSettings, *, left_nbytes: int, weights_nbytes: int) -> KvBudget:
    """Return the budget of the settings, or half of the memory that is left beside the weights.

    Each worker loads the weights; the other half is for the intermediate results of a step.

    The machine's memory is divided here. Operators of workers with memory of their own, on GPUs,
    set the number of tokens.
    """
    if settings.kv_cache_tokens:
        return KvBudget(num_tokens=settings.kv_cache_tokens)
    left_nbytes -= settings.tensor_parallel_size * weights_nbytes
    return KvBudget(nbytes=max(left_nbytes // 2, _LEAST_NBYTES))
