"""Choosing a token.

A draw depends on the request's seed and on how many tokens the sequence has, and on nothing that
happened before: so a sequence that is preempted and computed again goes on as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from afferent.engine.reference.model import logit_rules
from afferent.engine.reference.model.logit_rules import LogitRules
from afferent.types import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a sequence's next token is chosen.

    Attributes:
        sampling: Without a seed, it is as if the seed were 0.
        num_tokens: How many tokens it has so far, its prompt included.
        rules: What changes its logits first, if anything does.
    """

    sampling: Sampling
    num_tokens: int
    rules: LogitRules | None = None

    @property
    def is_plain(self) -> bool:
        """The likeliest token is chosen, as the model has it."""
        return self.rules is None and not self.sampling.temperature


def choose(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[int]:
    """A token from each row of ``(number of sequences, vocabulary)`` logits, which are kept.

    What a sequence gets does not depend on the others.
    """
    chosen: list[int] = logits.argmax(-1).tolist()
    _choose_in(chosen, logits, wanted, [i for i, each in enumerate(wanted) if not each.is_plain])
    return chosen


def _choose_in(
    chosen: list[int], logits: torch.Tensor, wanted: Sequence[Wanted], rows: list[int]
) -> None:
    """Put other tokens than the likeliest into ``chosen``, in these rows."""
    if not rows:
        return
    changed = logits[rows].float()  # a copy
    some = [wanted[row] for row in rows]
    logit_rules.apply(changed, [each.rules for each in some])
    best = changed.argmax(-1).tolist()
    drawn = [index for index, each in enumerate(some) if each.sampling.temperature]
    if drawn:
        tokens = _draw(changed[drawn], [some[index] for index in drawn])
        for index, token in zip(drawn, tokens, strict=True):
            best[index] = token
    for row, token in zip(rows, best, strict=True):
        chosen[row] = token


def _draw(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[int]:
    """A token from each row, at random."""

    def column(value_of: Callable[[Sampling], float], dtype: torch.dtype) -> torch.Tensor:
        values = [value_of(each.sampling) for each in wanted]
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

    temperatures = column(lambda sampling: sampling.temperature, torch.float64)
    # Differences, divided as doubles: the smallest temperature leaves the likeliest where it is.
    leads = logits - logits.amax(-1, keepdim=True)
    scaled = (leads.double() / temperatures).float()
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if any(each.sampling.min_p for each in wanted):
        least = column(lambda s: math.log(s.min_p) if s.min_p else -math.inf, torch.float32)
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
    if any(each.sampling.top_k for each in wanted):
        size = logits.shape[-1]
        ranks = column(lambda sampling: min(sampling.top_k or size, size) - 1, torch.int64)
        ordered = ordered.masked_fill(ordered < ordered.gather(-1, ranks), -torch.inf)
    likely = ordered.softmax(-1)
    reached = likely.double().cumsum(-1)
    # The smallest set of tokens that reaches top_p, the first in any case; all where it is 1.
    top_p = column(lambda s: s.top_p if s.top_p < 1.0 else math.inf, torch.float64)
    num = (reached - likely < top_p).sum(-1, keepdim=True).clamp(min=1)
    draws = torch.tensor([_random(each) for each in wanted], dtype=torch.float64)
    thresholds = draws.to(logits.device).unsqueeze(1) * reached.gather(-1, num - 1)
    # The first token that reaches more than the draw: one of no probability never does.
    places = (reached <= thresholds).sum(-1, keepdim=True).minimum(num - 1)
    tokens: list[int] = order.gather(-1, places).squeeze(1).tolist()
    return tokens


def _random(wanted: Wanted) -> float:
    seed = (wanted.sampling.seed or 0) % 2**64
    return float(np.random.default_rng((seed, wanted.num_tokens)).random())


def logprobs(logits: torch.Tensor, sampling: Sampling, token_id: int) -> TokenLogprobs | None:
    """Log-probabilities of the model itself, whatever the temperature; ``None`` if not wanted."""
    if sampling.num_logprobs is None:
        return None
    scores = logits.float().log_softmax(-1)
    best = scores.topk(min(sampling.num_logprobs, len(scores)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(float(scores[token_id]), top)
