"""Beginning of a prompt, computed by the engine while the rest of its pages is rendered.

The engine gets the messages up to the last page whose features exist, as a request of its own, and
keeps the KV cache of it. So the request itself computes only what is new, and the first token comes
soon after the last page, however many pages there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from afferent.builtin.pipeline.document_pages import beginning
from afferent.builtin.pipeline.request import GenerateRequest, TemplateOptions
from afferent.engines.protocol import Engine, EngineEvent, EngineRequest, Finished, Tokens
from afferent.errors import AfferentError
from afferent.items.documents import ReadDocument
from afferent.items.request import SeenMedia

_LEAST_PAGES: Final = 4
_GROWTH: Final = 8
"""A beginning has so many more pages than the one before, and at least 1 / `_GROWTH` more: all of
them together cost the frontend a fixed multiple of the last one."""


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
        compute: Callable[[GenerateRequest], Coroutine[Any, Any, Computed]],
    ) -> None:
        """Create it; nothing is computed.

        Args:
            request: Request with its documents.
            compute: Has the engine compute the messages of a request.
        """
        self._request, self._compute = request, compute
        self._documents: Sequence[ReadDocument] = ()
        self._stirred = asyncio.Event()
        self._is_complete = False
        self._computed = Computed(0, 0)
        self._num_cached = 0  # of the first beginning

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were computed ahead."""
        return self._computed.num_tokens - self._num_cached

    def begun(self, documents: Sequence[ReadDocument]) -> None:
        """Take note of further pages; see `DocumentReader.read`."""
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
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def submit(
        self, engine: Engine, request: EngineRequest
    ) -> AsyncGenerator[EngineEvent, None]:
        """Submit the request itself; what was computed ahead does not count as cached."""
        async with aclosing(engine.submit(request)) as events:
            async for event in events:
                if isinstance(event, Tokens | Finished) and self._computed.num_tokens:
                    num_cached = min(event.num_cached, self._num_cached)
                    event = structs.replace(event, num_cached=num_cached)
                yield event

    async def _run(self) -> None:
        num_pages = number = 0
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            if self._is_complete:
                return
            found = sum(len(document.pages) for document in self._documents)
            if found - num_pages < max(_LEAST_PAGES, num_pages // _GROWTH):
                continue
            num_pages, number = found, number + 1
            messages = beginning(self._request, self._documents).messages
            if any(not isinstance(p.source, SeenMedia) for m in messages for p in m.media):
                return  # it is read with the request itself
            variables = self._request.template.variables
            template = TemplateOptions(variables=variables, begins_answer=False)
            request = GenerateRequest(
                request_id=f"{self._request.request_id}-ahead-{number}",
                messages=messages,
                template=template,
                max_tokens=1,
                share=self._request.share,
            )
            try:
                computed = await self._compute(request)
            except AfferentError:
                return  # the request itself meets the same error, or none
            if computed.num_cached < self._computed.num_tokens:
                return
            if number == 1:
                self._num_cached = computed.num_cached
            self._computed = computed
