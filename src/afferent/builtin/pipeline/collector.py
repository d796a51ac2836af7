"""Collector of answers from their pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

from afferent.builtin.pipeline.call import Answer
from afferent.builtin.pipeline.request import (
    CallDelta,
    CallPart,
    End,
    Output,
    PromptInfo,
    ScoredToken,
    TextDelta,
)
from afferent.errors import InternalError


@dataclass(slots=True)
class _Call:
    name: str
    pieces: list[str] = field(default_factory=list)

    def complete(self) -> CallPart:
        return CallPart(self.name, "".join(self.pieces))


class AnswerCollector:
    """Collects all outputs of a request's ``n`` answers. Pure.

    Invariants:
        - Each answer has at most one end, and its pieces are in order of arrival.
    """

    def __init__(self, num_answers: int = 1) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_answers)]
        self._tokens: list[list[ScoredToken]] = [[] for _ in range(num_answers)]
        self._calls: list[list[_Call]] = [[] for _ in range(num_answers)]
        self._ends: dict[int, End] = {}
        self.digests: tuple[bytes, ...] = ()
        """Digests of the prompt's media."""

    def add(self, output: Output) -> None:
        match output:
            case PromptInfo(digests):
                self.digests = digests
            case TextDelta(text, index, logprobs):
                self._texts[index].append(text)
                self._tokens[index] += logprobs
            case CallDelta(index, number, name, arguments):
                if name is not None:
                    self._calls[index].append(_Call(name))
                self._calls[index][number].pieces.append(arguments)
            case End():
                self._ends[output.index] = output

    @property
    def text_so_far(self) -> tuple[str, tuple[ScoredToken, ...]]:
        """Text and log-probabilities of the first answer, as far as they have arrived."""
        return "".join(self._texts[0]), tuple(self._tokens[0])

    def call_so_far(self, number: int) -> CallPart:
        """Return a tool call of the first answer, as far as it has arrived."""
        return self._calls[0][number].complete()

    def complete(self) -> list[Answer]:
        """Return the complete answers.

        Raises:
            InternalError: One of them has no end.
        """
        if len(self._ends) != len(self._texts):
            raise InternalError("an answer has no end")
        return [
            Answer(
                "".join(text),
                self._ends[index],
                tuple(tokens),
                tuple(call.complete() for call in calls),
            )
            for index, (text, tokens, calls) in enumerate(
                zip(self._texts, self._tokens, self._calls, strict=True)
            )
        ]
