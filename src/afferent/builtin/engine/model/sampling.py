"""Choice of a token.

A draw depends only on the request's seed and on the number of the sequence's tokens. So a sequence
that is preempted and computed again continues as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from afferent.builtin.engine.model import logit_rules
from afferent.builtin.engine.model.form_guide import TokenMask
from afferent.builtin.engine.model.logit_rules import LogitRules
from afferent.types import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parameters of the choice of a sequence's next token.

    Attributes:
        sampling: Without a seed, the seed is 0.
        num_tokens: Number of its tokens so far, its prompt included.
        rules: Rules that change its logits first, if any.
        mask: The tokens that may be chosen; ``None``: all.
        optional: A token that may be chosen only if it is the likeliest of all tokens. A mask that
            excludes the likeliest one would make it likelier than the model does.
    """

    sampling: Sampling
    num_tokens: int
    rules: LogitRules | None = None
    mask: TokenMask | None = None
    optional: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the token with the model's largest logit is chosen."""
        return self.rules is None and self.mask is None and not self.sampling.temperature


def choose(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[int]:
    """Return a token for each row of ``(number of sequences, vocabulary)`` logits, which are
    unchanged.

    The token of a sequence does not depend on the others.
    """
    chosen: list[int] = logits.argmax(-1).tolist()
    _choose_in(chosen, logits, wanted, [i for i, each in enumerate(wanted) if not each.is_plain])
    return chosen


def _choose_in(
    chosen: list[int], logits: torch.Tensor, wanted: Sequence[Wanted], rows: list[int]
) -> None:
    """Replace the likeliest tokens in ``chosen``, in these rows."""
    if not rows:
        return
    changed = logits[rows].float()  # a copy
    some = [wanted[row] for row in rows]
    logit_rules.apply(changed, [each.rules for each in some])
    for index, each in enumerate(some):
        if each.optional is not None and changed[index].argmax() != each.optional:
            changed[index, each.optional] = -math.inf
    masked = [index for index, each in enumerate(some) if each.mask is not None]
    if masked:
        _mask(changed, masked, [some[index].mask for index in masked])
        best_of = changed.amax(-1).tolist()
        if lost := [index for index in masked if best_of[index] == -math.inf]:
            # A complete answer can only end, even if its other parameters forbid the end.
            changed[lost] = logits[[rows[index] for index in lost]].float()
            _mask(changed, lost, [some[index].mask for index in lost])
    best = changed.argmax(-1).tolist()
    drawn = [index for index, each in enumerate(some) if each.sampling.temperature]
    if drawn:
        tokens = _draw(changed[drawn], [some[index] for index in drawn])
        for index, token in zip(drawn, tokens, strict=True):
            best[index] = token
    for row, token in zip(rows, best, strict=True):
        chosen[row] = token


def _mask(logits: torch.Tensor, rows: list[int], masks: Sequence[TokenMask | None]) -> None:
    """Forbid, in these rows, all tokens outside of their masks, and those beyond a short mask."""
    bits = np.stack([mask for mask in masks if mask is not None])
    may_not = np.unpackbits(bits, axis=1, bitorder="little") == 0
    size = logits.shape[-1]
    if may_not.shape[1] < size:
        may_not = np.pad(may_not, ((0, 0), (0, size - may_not.shape[1])), constant_values=True)
    forbidden = torch.from_numpy(may_not[:, :size]).to(logits.device)
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def _draw(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[int]:
    """Return a random token for each row."""
    samplings = [each.sampling for each in wanted]
    weights = _weights(logits, samplings)
    if rows := [row for row, each in enumerate(samplings) if each.top_p < 1.0]:
        top_p = _column(logits, [samplings[row].top_p for row in rows])
        weights[rows] = _likeliest(weights[rows], top_p)
    reached = weights.cumsum(-1)
    draws = _column(logits, [_random(each) for each in wanted])
    # The first token that reaches more than the draw: one of no weight never does.
    places = (reached <= draws * reached[:, -1:]).sum(-1)
    tokens: list[int] = places.clamp(max=logits.shape[-1] - 1).tolist()
    return tokens


def _weights(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return the weight of each token relative to the likeliest, whose weight is 1; as doubles.
    Tokens that ``min_p`` and ``top_k`` exclude have weight 0.
    """
    temperatures = _column(logits, [each.temperature for each in samplings])
    # Differences, divided as doubles: the smallest temperature leaves the likeliest where it is.
    scaled = (logits - logits.amax(-1, keepdim=True)).double() / temperatures
    if any(each.min_p for each in samplings):
        logs = [math.log(each.min_p) if each.min_p else -math.inf for each in samplings]
        scaled.masked_fill_(scaled < _column(logits, logs), -torch.inf)
    if rows := [row for row, each in enumerate(samplings) if each.top_k]:
        ranks = [min(samplings[row].top_k, logits.shape[-1]) for row in rows]
        best = scaled[rows].topk(max(ranks)).values
        last = best.gather(-1, torch.tensor(ranks, device=logits.device).unsqueeze(1) - 1)
        scaled[rows] = scaled[rows].masked_fill(scaled[rows] < last, -torch.inf)
    return scaled.exp_()


def _likeliest(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weights of the smallest set of tokens with this part of all weight; 0 for the
    others.

    The first token is always in the set. Among equal tokens, the first ones are in it.
    """
    wanted = weights.sum(-1, keepdim=True) * top_p
    # Tokens below this weight sum to less than the excluded part: only the others need sorting.
    left_over = weights.sum(-1, keepdim=True) - wanted
    weights = weights.masked_fill(weights < left_over / weights.shape[-1], 0.0)
    num = int((weights > 0).sum(-1).max())
    places = weights.topk(num).indices.sort(-1).values
    ordered, order = weights.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    is_in = ordered.cumsum(-1) - ordered < wanted
    is_in[:, 0] = True
    kept = torch.zeros_like(weights)
    return kept.scatter_(-1, places.gather(-1, order), torch.where(is_in, ordered, 0.0))


def _column(logits: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Return a number for each row, as doubles."""
    return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)


def _random(wanted: Wanted) -> float:
    seed = (wanted.sampling.seed or 0) % 2**64
    return float(np.random.default_rng((seed, wanted.num_tokens)).random())


def logprobs(logits: torch.Tensor, sampling: Sampling, token_id: int) -> TokenLogprobs | None:
    """Return log-probabilities of the model itself, at any temperature; ``None`` if not
    requested.
    """
    if sampling.num_logprobs is None:
        return None
    scores = logits.float().log_softmax(-1)
    best = scores.topk(min(sampling.num_logprobs, len(scores)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(float(scores[token_id]), top)
