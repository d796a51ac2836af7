"""Settings of the built-in engine."""

from __future__ import annotations

from afferent.config import Group, Settings, setting
from afferent.errors import ConfigError
from afferent.types import MiB

LEAST_KV_TOKENS = 256
"""Tokens of a short chat with an image, for the smallest models."""
LEAST_MODEL_LEN = 64


class ReferenceSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Division of the model, sizes of a step, and memory."""

    tensor_parallel_size: int = setting(
        1, "processes that share the model's heads", Group.COMMON, ge=1, le=64
    )
    max_model_len: int = setting(
        0, "longest prompt and answer, in tokens; 0: what the model allows", Group.COMMON, ge=0
    )
    max_num_seqs: int = setting(
        128,
        "answers that get a token in a step; more requests run, and take turns",
        Group.COMMON,
        gt=0,
    )
    kv_cache_tokens: int = setting(
        0,
        "tokens that running requests may hold in all; 0: what suits the memory",
        Group.COMMON,
        ge=0,
    )
    prefix_cache_tokens: int = setting(
        32_768,
        "tokens of ended requests whose KV cache stays for prompts that begin alike; 0: none",
        Group.ENGINE,
        ge=0,
    )
    max_num_batched_tokens: int = setting(
        512,
        "tokens computed in a step: longer prompts are done in chunks, and who comes waits for one",
        Group.ENGINE,
        gt=0,
    )
    max_num_batched_embeds: int = setting(
        32_768,
        "rows of embeddings encoded in a step; no item may have more",
        Group.ENGINE,
        gt=0,
    )
    encoder_cache_nbytes: int = setting(
        256 * MiB,
        "embeddings that each engine worker keeps for the next request",
        Group.MEMORY,
        ge=MiB,
    )
    engine_step_timeout_s: float = setting(
        120.0, "for one step; engine workers that take longer are killed", Group.TIMEOUTS, gt=0
    )

    def check(self) -> None:
        """See `Settings.check`."""
        if 0 < self.kv_cache_tokens < LEAST_KV_TOKENS:
            raise ConfigError(
                f"--kv-cache-tokens {self.kv_cache_tokens}: must be at least {LEAST_KV_TOKENS}, or "
                "0: running requests, prompts and images included, would not fit into fewer"
            )
        if 0 < self.max_model_len < LEAST_MODEL_LEN:
            raise ConfigError(
                f"--max-model-len {self.max_model_len}: must be at least {LEAST_MODEL_LEN}, or 0: "
                "no prompt would leave room for an answer"
            )
        if 0 < self.kv_cache_tokens < self.max_model_len:
            raise ConfigError(
                f"a request of {self.max_model_len:,} tokens, as --max-model-len allows, does not "
                f"fit into the {self.kv_cache_tokens:,} of --kv-cache-tokens"
            )
