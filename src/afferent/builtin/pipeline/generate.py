"""Conversion of an engine's tokens to pieces of an answer, and merging of several answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from afferent.builtin.pipeline.call_reader import CallReader
from afferent.builtin.pipeline.prompt import Detokenizer
from afferent.builtin.pipeline.request import (
    End,
    Output,
    ScoredToken,
    TextDelta,
    Usage,
    WriteScored,
)
from afferent.builtin.pipeline.stops import StopMatcher
from afferent.engines.protocol import Finished, Tokens
from afferent.types import TokenLogprobs

T = TypeVar("T")


@dataclass(slots=True)
class AnswerWriter:
    """Writer of one of a request's answers; no I/O.

    Text may come later than its tokens, while it may begin a stop string or is a part of a
    character. Log-probabilities do not wait for it: each token's entry from ``write_scored`` is
    sent once, when the token arrives, also for the tokens of a stop string.
    """

    index: int
    num_prompt_tokens: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    write_scored: WriteScored | None = None
    min_tokens: int = 0
    """Minimum tokens before a stop string ends the answer."""
    stop_token_ids: tuple[int, ...] = ()
    calls: CallReader | None = None
    num_tokens: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)

    def feed(self, tokens: Tokens) -> list[Output]:
        """Return the next piece; and the end, if a stop string was met."""
        self.num_cached += tokens.num_cached
        text = self._text(tokens.token_ids)
        scored: tuple[ScoredToken, ...] = ()
        if (write := self.write_scored) is not None:
            scored = tuple(
                self._scored(write, token, logprobs)
                for token, logprobs in zip(tokens.token_ids, tokens.logprobs, strict=False)
            )
        outputs = self._said(text)
        if scored and outputs and isinstance(outputs[0], TextDelta):
            outputs[0] = replace(outputs[0], logprobs=scored)
        elif scored:
            outputs.insert(0, TextDelta("", self.index, scored))
        if self.matcher.met is not None:
            outputs += self._ending("stop", self.matcher.met)
        return outputs

    def finish(self, finished: Finished) -> list[Output]:
        """Return the rest, when the engine has ended the answer."""
        token_id = finished.token_id
        self.num_cached += finished.num_cached
        text = self.matcher.flush()
        if token_id is not None and self.matcher.is_included:
            self.num_tokens += 1
            text += self.detokenizer.feed([token_id])
        text += self.detokenizer.flush()
        stop = token_id if token_id in self.stop_token_ids else None
        return [*self._said(text), *self._ending(finished.reason, stop)]

    def _text(self, token_ids: Sequence[int]) -> str:
        num_early = min(max(0, self.min_tokens - self.num_tokens), len(token_ids))
        self.num_tokens += len(token_ids)
        early, others = token_ids[:num_early], token_ids[num_early:]
        text = self.matcher.feed(self.detokenizer.feed(early), may_end=False) if early else ""
        return text + (self.matcher.feed(self.detokenizer.feed(others)) if others else "")

    def _said(self, text: str) -> list[Output]:
        if self.calls is not None:
            return self.calls.feed(text)
        return [TextDelta(text, self.index)] if text else []

    def _ending(self, reason: Literal["stop", "length"], stop: str | int | None) -> list[Output]:
        """Return the end, behind the text that could have begun a call."""
        rest = [] if self.calls is None else self.calls.flush()
        usage = Usage(self.num_prompt_tokens, self.num_tokens, self.num_cached)
        return [*rest, End(reason, usage, self.index, stop)]

    def _scored(self, write: WriteScored, token: int, logprobs: TokenLogprobs) -> ScoredToken:
        text_of = self.detokenizer.text_of
        top = [(text_of(other), logprob) for other, logprob in logprobs.top]
        return write(text_of(token), logprobs.logprob, top)


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the values of all streams as they arrive; close all at the end, or when one fails."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for value in only:
                yield value
        return
    arrived: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue()
    # One value at a time waits for the reader. Ends do not wait, as the reader may have stopped.
    room = asyncio.Semaphore(1)

    async def forward(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as values:
                async for value in values:
                    await room.acquire()
                    arrived.put_nowait((value,))
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            match await arrived.get():
                case (value,):
                    room.release()
                    yield value
                case Exception() as error:
                    raise error
                case None:
                    num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
