"""Beginning of a prompt, computed by the engine while the rest of its pages is rendered.

The engine gets the messages up to the last page whose features exist, as a request of its own, and
keeps the KV cache of it. So the request itself computes only what is new, and the first token comes
soon after the last page, however many pages there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import structs

from afferent.builtin.pipeline.document_pages import beginning
from afferent.builtin.pipeline.request import GenerateRequest
from afferent.engines.protocol import Engine, EngineEvent, EngineRequest, Finished, Tokens
from afferent.errors import AfferentError
from afferent.items.documents import ReadDocument
from afferent.items.request import SeenMedia

log = logging.getLogger(__name__)

_LEAST_PAGES: Final = 4
_GROWTH: Final = 8
"""A beginning has so many more pages than the one before, or 1 / `_GROWTH` more: then all of them
together cost the frontend a fixed multiple of the last one, and the request waits for a part of its
prompt only."""
_LEAST_WAIT_S: Final = 1.0
_WAIT: Final = 2
"""The request waits so many times as long as the slowest beginning has taken, for the last one."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Beginning that the engine has computed.

    Attributes:
        num_tokens: Number of its tokens.
        num_cached: Number of those whose KV cache was there already.
    """

    num_tokens: int
    num_cached: int


class PromptAhead:
    """Computes beginnings of one request's prompt.

    Invariants:
        - One beginning is computed at a time.
        - No further one is computed once the engine has not used the one before: it was dropped, or
          the chat template writes pages otherwise if more of them follow.
    """

    def __init__(
        self,
        request: GenerateRequest,
        compute: Callable[[GenerateRequest], Coroutine[Any, Any, Computed | None]],
    ) -> None:
        """Create it; nothing is computed.

        Args:
            request: Request with its documents.
            compute: Has the engine compute the messages of a request. After an error, or ``None``,
                no further ones are computed.
        """
        self._request, self._compute = request, compute
        self._documents: Sequence[ReadDocument] | None = None
        self._num_pages = 0  # of the last beginning, or those that were known
        self._stirred = asyncio.Event()
        self._is_complete = False  # all pages are known
        self._slowest_s = 0.0
        self.num_new = 0
        """Number of tokens that were computed, and not cached."""

    def begun(self, documents: Sequence[ReadDocument]) -> None:
        """Take note of the known pages, and then of further ones; see `DocumentReader.read`."""
        if self._documents is None:
            self._num_pages = _num_pages(documents)
        self._documents = documents
        self._stirred.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute beginnings while the block runs; wait at its end for the one that runs then."""
        task = asyncio.create_task(self._run())
        try:
            yield
            self._is_complete = True
            self._stirred.set()
            await asyncio.wait([task], timeout=max(_LEAST_WAIT_S, _WAIT * self._slowest_s))
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def submit(
        self, engine: Engine, request: EngineRequest
    ) -> AsyncGenerator[EngineEvent, None]:
        """Submit the request itself; what was computed ahead does not count as cached."""
        async with aclosing(engine.submit(request)) as events:
            async for event in events:
                if isinstance(event, Tokens | Finished) and event.num_cached:
                    num_cached = max(0, event.num_cached - self.num_new)
                    event = structs.replace(event, num_cached=num_cached)
                yield event

    async def _run(self) -> None:
        try:
            await self._compute_all()
        except AfferentError as error:  # the request itself meets the same one, or none
            log.debug("no further beginning of a prompt is computed: %s", error.message)
        except Exception:
            log.exception("the beginning of a prompt could not be computed")

    async def _compute_all(self) -> None:
        number = num_tokens = 0
        while (documents := await self._next()) is not None:
            begun = beginning(self._request, documents)
            if any(not isinstance(part.source, SeenMedia) for part in begun.media):
                return  # it is read with the request itself
            if not begun.media:
                continue
            number, start_s = number + 1, time.monotonic()
            computed = await self._compute(
                GenerateRequest(
                    request_id=f"{self._request.request_id}-ahead-{number}",
                    messages=begun.messages,
                    template=replace(begun.template, begins_answer=False, continues_last=False),
                    max_tokens=1,
                    share=begun.share,
                )
            )
            if computed is None:
                return
            self._slowest_s = max(self._slowest_s, time.monotonic() - start_s)
            self.num_new += computed.num_tokens - computed.num_cached
            if computed.num_cached < num_tokens:
                return
            num_tokens = computed.num_tokens

    async def _next(self) -> list[ReadDocument] | None:
        """Return the documents of the next beginning; ``None`` when all pages are known."""
        while not self._is_complete:
            wanted = self._num_pages + max(_LEAST_PAGES, self._num_pages // _GROWTH)
            if self._documents is not None and _num_pages(self._documents) >= wanted:
                self._num_pages = wanted
                return _first_pages(self._documents, wanted)
            self._stirred.clear()
            await self._stirred.wait()
        return None


def _num_pages(documents: Sequence[ReadDocument]) -> int:
    return sum(len(document.pages) for document in documents)


def _first_pages(documents: Sequence[ReadDocument], number: int) -> list[ReadDocument]:
    """Return the documents with so many pages, of more; the last one lacks the rest of its own."""
    found: list[ReadDocument] = []
    for document in documents:
        if number:
            pages = document.pages[:number]
            found.append(ReadDocument(document.digest, pages))
            number -= len(pages)
    return found
