"""Rules that change a sequence's logits before a token is chosen, in the order of vLLM.

Only the tokens that a rule names are changed, for all sequences at once: a long vocabulary and a
sequence without rules cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from afferent.types import Sampling

_NO_RULE: Final = Sampling(max_tokens=1)
_ROOM = 64


class History:
    """Distinct tokens of a sequence, and the number of each in its answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        known = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(known)}
        self._ids = np.zeros(len(known) + _ROOM, np.int64)
        self._ids[: len(known)] = known
        self._counts = np.zeros(len(self._ids), np.float32)
        for token in answer:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """In the order of ``ids``; 0 for tokens that only the prompt has."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Add a token of the answer."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1


class LogitRules:
    """Rules of one sequence, and the part of its past that they use."""

    def __init__(
        self,
        sampling: Sampling,
        token_ids: Sequence[int],
        *,
        num_answered: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Collect the rules.

        Args:
            token_ids: The prompt, and the answer so far.
            num_answered: Number of the answer's tokens among them.
        """
        self.sampling = sampling
        num_prompt = len(token_ids) - num_answered
        self._num_answered = num_answered
        ends = {*eos_token_ids, *sampling.stop_token_ids}
        self._ends = np.array(sorted(ends), np.int64)
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.history = (
            History(token_ids[:num_prompt], token_ids[num_prompt:])
            if _has_penalties(sampling)
            else None
        )

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        token_ids: Sequence[int],
        *,
        num_answered: int,
        eos_token_ids: Sequence[int],
    ) -> LogitRules | None:
        """Return the rules; ``None``: the parameters do not change logits."""
        if not (sampling.min_tokens or sampling.logit_bias or _has_penalties(sampling)):
            return None
        return cls(sampling, token_ids, num_answered=num_answered, eos_token_ids=eos_token_ids)

    @property
    def forbidden(self) -> NDArray[np.int64]:
        """Tokens that may not be chosen now."""
        return self._ends if self._num_answered < self.sampling.min_tokens else self._ends[:0]

    def add(self, token_id: int) -> None:
        """Add a chosen token."""
        self._num_answered += 1
        if self.history is not None:
            self.history.add(token_id)


def apply(logits: torch.Tensor, rules: Sequence[LogitRules | None]) -> None:
    """Change ``(sequences, vocabulary)`` float32 logits in place; ignore tokens beyond the
    vocabulary.
    """
    ruled = [(row, each) for row, each in enumerate(rules) if each is not None]
    forbidden = _Tokens(logits, [(row, each.forbidden) for row, each in ruled])
    if forbidden:
        forbidden.set(-torch.inf)
    biased = _Tokens(logits, [(row, each.bias_ids) for row, each in ruled])
    if biased:
        biases = biased.beside([each.biases for _, each in ruled])
        biased.set(biased.logits + biases)
    _penalize(logits, [(row, each.sampling, each.history) for row, each in ruled if each.history])


def _penalize(logits: torch.Tensor, ruled: Sequence[tuple[int, Sampling, History | None]]) -> None:
    with_past = [(row, sampling, past) for row, sampling, past in ruled if past is not None]
    tokens = _Tokens(logits, [(row, past.ids) for row, _, past in with_past])
    if not tokens:
        return

    def per_token(value_of: Callable[[Sampling], float]) -> torch.Tensor:
        return tokens.beside(
            [np.full(len(p.ids), value_of(s), np.float32) for _, s, p in with_past]
        )

    counts = tokens.beside([past.counts for _, _, past in with_past])
    repetition = per_token(lambda sampling: sampling.repetition_penalty)
    values = tokens.logits
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - per_token(lambda sampling: sampling.frequency_penalty) * counts
    values = values - per_token(lambda sampling: sampling.presence_penalty) * (counts > 0)
    tokens.set(values)


class _Tokens:
    """Tokens of some rows, as one flat array."""

    def __init__(
        self, logits: torch.Tensor, tokens: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> None:
        self._logits = logits
        ids = np.concatenate([ids for _, ids in tokens]) if tokens else np.zeros(0, np.int64)
        rows = np.repeat([row for row, _ in tokens], [len(ids) for _, ids in tokens])
        self._kept = ids < logits.shape[-1]
        self._rows = self._put(rows.astype(np.int64))
        self._ids = self._put(ids)

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    @property
    def logits(self) -> torch.Tensor:
        return self._logits[self._rows, self._ids]

    def beside(self, values: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        """Return a number for each of the tokens inside the vocabulary, from one for each given
        token.
        """
        return self._put(np.concatenate(values))

    def set(self, values: torch.Tensor | float) -> None:
        given = torch.as_tensor(values, dtype=self._logits.dtype, device=self._logits.device)
        self._logits.index_put_((self._rows, self._ids), given)

    def _put(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values[self._kept]).to(self._logits.device)


def _has_penalties(sampling: Sampling) -> bool:
    return any(
        getattr(sampling, name) != getattr(_NO_RULE, name)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
