"""Requests that run together in random steps: chunks of any size, tokens, preemptions."""

from __future__ import annotations

import numpy as np

from afferent.schedule.step import Chunk, Reuse
from tests.engine.runner_model import GREEDY, NUM_TOKENS, Model, Prepared


class RandomSteps:
    """A random run of requests; `tokens` has the answer of each request, by its number."""

    def __init__(self, model: Model, prepared: list[Prepared], rng: np.random.Generator) -> None:
        self._model, self._rng = model, rng
        self._prepared = {str(number): each for number, each in enumerate(prepared)}
        self._computed = dict.fromkeys(self._prepared, -1)  # -1: not begun
        self.tokens: dict[str, list[int]] = {name: [] for name in self._prepared}
        self.num_preempted = self.num_mixed = self.num_reused = 0

    def run(self) -> None:
        while unfinished := [n for n, t in self.tokens.items() if len(t) < NUM_TOKENS]:
            chunks, decode = [], []
            for name in unfinished:
                match self._rng.integers(10):
                    case 0:
                        self._drop(name)
                    case 1:
                        self._begin_again(name)
                    case 2:
                        pass
                    case _:
                        chunk = self._next(name)
                        chunks += [chunk] if chunk else []
                        decode += [] if chunk else [name]
            self._step(chunks, decode)

    def _drop(self, name: str) -> None:
        if self._computed[name] >= 0:
            self._model.runner.drop(name)
            self._computed[name] = -1
            self.num_preempted += 1

    def _begin_again(self, name: str) -> None:
        """Begin a sequence with a part of what is computed of it."""
        each, computed = self._prepared[name], self._computed[name]
        if computed < 1 or self._model.runner.info.cross_attention:
            return
        known = [*each.prompt.token_ids, *self.tokens[name]]
        number = min(int(self._rng.integers(1, computed + 1)), len(known) - 1)
        if not self._model.runner.info.can_split_items:
            for item in each.items:
                first = item.placeholder.offset
                if first < number < first + item.placeholder.length:
                    number = first
        is_move = number == computed
        reuse = Reuse(name, name, number, is_move) if number else None
        self._model.runner.begin(
            name,
            known,
            each.items,
            GREEDY,
            num_answered=len(self.tokens[name]),
            reuse=reuse,
        )
        self._computed[name] = number
        self.num_reused += reuse is not None

    def _next(self, name: str) -> Chunk | None:
        """Return a chunk of random size, or nothing if only the last token is left to compute."""
        each, chosen = self._prepared[name], self.tokens[name]
        known = [*each.prompt.token_ids, *chosen]
        if self._computed[name] < 0:
            self._model.runner.begin(name, known, each.items, GREEDY)
            self._computed[name] = 0
        start = self._computed[name]
        if chosen and start == len(known) - 1:
            return None
        end = start + int(self._rng.integers(1, max(41, len(known) // 6)))
        if not self._model.runner.info.can_split_items:
            for item in each.items:
                offset = item.placeholder.offset
                if offset < end < offset + item.placeholder.length:
                    end = offset + item.placeholder.length
        end = min(end, len(known))
        return Chunk(name, start, end - start, samples=end == len(known))

    def _step(self, chunks: list[Chunk], decode: list[str]) -> None:
        embeddings = {}
        for chunk in chunks:
            each, end = self._prepared[chunk.sequence_id], chunk.start + chunk.num_tokens
            self._computed[chunk.sequence_id] = end
            for item in each.items:  # only the items that the chunk's window touches
                first, length = item.placeholder.offset, item.placeholder.length
                if chunk.start < first + length and first < end:
                    embeddings[item.key] = each.embeddings[item.key]
        for name in decode:
            self._computed[name] += 1
        self.num_mixed += bool(chunks) and bool(decode)
        for chosen in self._model.runner.run(chunks, decode, embeddings):
            self.tokens[chosen.sequence_id].append(chosen.token_id)
