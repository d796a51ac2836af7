"""Shards of a model's language layers for the ranks, by the model's own plan.

`transformers` would shard while it loads, but only with `accelerate` installed. So the whole model
is loaded first, and the parts of other ranks are dropped. The encoder, the token embeddings and the
head stay whole: every rank has the same states between layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import CONFIG_MAPPING

from afferent.builtin.engine.model.group import Group
from afferent.errors import ConfigError, UnsupportedModel
from afferent.media.families.registry import engine_facts

_WHOLE: Final = frozenset(
    {"colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"}
)
"""Styles of modules that stay whole: the result is the same."""


class _Reduced(nn.Module):
    """Layer whose inputs are sharded: each rank has a part of each sum."""

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__()
        self._group = group
        self.weight = _shard(whole.weight, 1, group)
        self.bias = whole.bias

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out = self._group.all_reduce(linear(values, self.weight))
        return out if self.bias is None else out + self.bias


def keep_shard(model: Any, group: Group) -> None:
    """Cut the language model down to this rank's shard.

    Raises:
        UnsupportedModel: It has no plan, or one with more than sharded matrices.
        ConfigError: Its heads can't be divided evenly.
    """
    config, decoder = model.config.get_text_config(), model.get_decoder()
    plan = _plan(config, engine_facts(model.config.model_type).sharded_like)
    heads = config.num_attention_heads, config.num_key_value_heads
    if any(number % group.size for number in heads):
        raise ConfigError(f"{heads[0]} and {heads[1]} heads can't be shared by {group.size} ranks")
    for name, module in list(decoder.named_modules()):
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style == "colwise":
            _cut_outputs(module, group)
        elif style == "rowwise":
            parent, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(parent), attribute, _Reduced(module, group))


def _plan(config: Any, sharded_like: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each sharded module of the language model, by name."""
    other = sharded_like.get(config.model_type)
    like = config if other is None else CONFIG_MAPPING[other]
    plan: dict[str, str] = getattr(like, "base_model_tp_plan", None) or {}
    if "rowwise" not in plan.values():
        raise UnsupportedModel(f"there is no plan to shard a model of type {config.model_type}")
    if unknown := set(plan.values()) - _WHOLE - {"colwise", "rowwise"}:
        raise UnsupportedModel(f"layers of {config.model_type} are not sharded here: {unknown}")
    return plan


def _cut_outputs(module: nn.Linear, group: Group) -> None:
    module.weight = _shard(module.weight, 0, group)
    if module.bias is not None:
        module.bias = _shard(module.bias, 0, group)


def _shard(whole: torch.Tensor, dim: int, group: Group) -> nn.Parameter:
    length, rest = divmod(whole.shape[dim], group.size)
    if rest:
        raise ConfigError(f"{whole.shape[dim]} rows can't be shared by {group.size} ranks")
    shard = whole.detach().narrow(dim, group.rank * length, length)
    return nn.Parameter(shard.clone(memory_format=torch.contiguous_format), requires_grad=False)
