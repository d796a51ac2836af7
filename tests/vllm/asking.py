"""Many concurrent questions to one server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2 as httpx

from tests.vllm.questions import Question, Said, said

NUM_AT_ONCE = 8
TIMEOUT_S = 120.0
_AGAIN_S = 0.3


@dataclass(slots=True)
class Answer:
    """An answer; `said` is ``None`` if the client left or the server disconnected."""

    said: Said | None
    seconds: float = 0.0
    broke_off: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether a client accepts this answer and does not retry."""
        if self.said is None or self.said.status >= 500:
            return False
        return bool(self.said.ends) and not any(end.startswith("error") for end in self.said.ends)


async def ask_all(
    url: str,
    asked: Sequence[Question],
    *,
    num_at_once: int = NUM_AT_ONCE,
    again_for_s: float = 0.0,
    every: list[tuple[Question, Answer]] | None = None,
) -> list[Answer]:
    """Ask all questions; return the answers in order. Each has a time limit of `TIMEOUT_S`.

    Args:
        again_for_s: How long failed questions are retried, as clients do.
        every: Gets all answers, including those that are retried.
    """
    room = asyncio.Semaphore(num_at_once)
    limits = httpx.Limits(max_connections=num_at_once)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, base_url=url) as client:

        async def one(question: Question) -> Answer:
            async with room:
                loop = asyncio.get_running_loop()
                begun_s = loop.time()
                while True:
                    start_s = loop.time()
                    answer = await _ask(client, question)
                    answer.seconds = loop.time() - start_s
                    if every is not None:
                        every.append((question, answer))
                    if answer.is_complete or loop.time() > begun_s + again_for_s:
                        return answer
                    await asyncio.sleep(_AGAIN_S)

        return list(await asyncio.gather(*map(one, asked)))


async def _ask(client: httpx.AsyncClient, question: Question) -> Answer:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async with client.stream("POST", question.path, json=question.body) as response:
                text = b""
                async for chunk in response.aiter_bytes():
                    text += chunk
                    if question.aborts is not None and len(text) >= question.aborts:
                        return Answer(None)
                return Answer(said(question, response.status_code, text.decode()))
    except (httpx.HTTPError, OSError) as error:
        return Answer(None, broke_off=type(error).__name__)
    except TimeoutError:
        return Answer(None, broke_off="hangs")
