"""Settings and checks for the start of the engine, without imports of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

from afferent.builtin.engine.kv_budget import KvBudget
from afferent.errors import ConfigError
from afferent.media.families.family import longest_prompt, read_json, text_config
from afferent.media.families.registry import AnyFamily

CORE: Final = "afferent.builtin.engine.core.main"
WORKER: Final = "afferent.builtin.engine.worker.main"

FORMS: Final = "afferent.builtin.engine.form.main"

_SHARED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "inner columns",
}
"""Parts of a model that are divided equally among workers."""


class CoreSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    store_address: str
    listener_fd: int
    num_workers: Annotated[int, Meta(ge=1)]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_batched_embeds: int
    encoder_cache_nbytes: int
    prefix_cache_tokens: int
    kv_budget: KvBudget
    step_timeout_s: float
    position_features: frozenset[str] = frozenset()
    has_tier: bool = False


class WorkerSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker; ``shares_embeddings``: whether the arena has space for embeddings."""

    store_address: str
    core_address: str
    rank: int
    num_workers: int
    model_folder: str
    family: AnyFamily
    max_model_len: int
    kv_budget: KvBudget
    shares_embeddings: bool


class FormSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    core_address: str
    model_folder: str


def check_workers(folder: Path, num_workers: int) -> None:
    """Refuse more workers than a model can be divided among, as far as its config says.

    Raises:
        ConfigError: Some workers would get a larger part than others.
    """
    text = text_config(read_json(folder / "config.json"))
    for name, words in _SHARED.items():
        number = text.get(name)
        if isinstance(number, int) and number % num_workers:
            raise ConfigError(
                f"the model's {number} {words} can't be divided among {num_workers} engine "
                "workers; choose another number of --tensor-parallel-size"
            )


def check_length(folder: Path, max_model_len: int) -> None:
    """Refuse requests that are longer than the limit in the model's config, if there is one.

    Raises:
        ConfigError: See `refuse_longer`.
    """
    limit = longest_prompt(read_json(folder / "config.json"))
    if limit is not None:
        refuse_longer(max_model_len, limit)


def refuse_longer(max_model_len: int, limit: int) -> None:
    """Check the longest request against the model's limit.

    Raises:
        ConfigError: The model takes fewer tokens.
    """
    if max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {max_model_len:,} is more than the {limit:,} tokens that the model "
            "has room for"
        )
