"""Choosing a token.

A draw depends on the request's seed and on how many tokens the sequence has, and on nothing that
happened before: so a sequence that is preempted and computed again goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from afferent.types import Sampling, TokenLogprobs


def choose(logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]]) -> list[int]:
    """A token from each row of ``(number of sequences, vocabulary)`` logits.

    Args:
        logits: Not changed.
        wanted: For each sequence how to choose, and how many tokens it has so far, its prompt
            included. Without a seed, it is as if the seed were 0.
    """
    best = logits.argmax(-1).tolist()
    return [
        _draw(row, sampling, index) if sampling.temperature else likeliest
        for row, likeliest, (sampling, index) in zip(logits, best, wanted, strict=True)
    ]


def _draw(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    # Differences, divided as doubles: the smallest temperature leaves the likeliest where it is.
    scaled = ((logits.float() - logits.max()).double() / sampling.temperature).float()
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, len(scaled))).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    ordered, order = scaled.softmax(-1).sort(descending=True, stable=True)
    reached = ordered.double().cumsum(-1)
    if sampling.top_p < 1.0:
        # The smallest set of tokens that reaches top_p, the first in any case.
        num = int((reached - ordered < sampling.top_p).sum())
        reached = reached[: max(1, num)]
    seed = (sampling.seed or 0) % 2**64
    draw = np.random.default_rng((seed, index)).random() * float(reached[-1])
    # The first token that reaches more than the draw: one of no probability never does.
    chosen = int((reached <= draw).sum())
    return int(order[min(chosen, len(reached) - 1)])


def logprobs(logits: torch.Tensor, sampling: Sampling, token_id: int) -> TokenLogprobs | None:
    """Log-probabilities of the model itself, whatever the temperature; ``None`` if not wanted."""
    if sampling.num_logprobs is None:
        return None
    scores = logits.float().log_softmax(-1)
    best = scores.topk(min(sampling.num_logprobs, len(scores)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(float(scores[token_id]), top)
