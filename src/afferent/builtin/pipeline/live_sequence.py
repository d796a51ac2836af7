"""Sequence of a live session in the engine: items extend it as they arrive.

So an answer computes only the items that came since the last ones were computed. The engine may
lose the sequence, and a removal of items invalidates it. Then it is begun again, from the items
that the session has. A frontend that continues a session finds its sequence by a *mark*: a digest
of the items in it, which the engine stores with it.

A sequence can be extended if the model's chat template writes each message by itself: then the
tokens of new messages are the same behind any others. `PromptBuilder.appended` finds that out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec import structs

from afferent import keys
from afferent.admission.shares import Share
from afferent.builtin.pipeline.live_session import LiveItem, LiveSession
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.prompt_stage import SequencePlace
from afferent.builtin.pipeline.request import (
    GenerateRequest,
    Message,
    Output,
    PromptInfo,
    TemplateOptions,
    TextPart,
)
from afferent.engines.protocol import (
    EngineEvent,
    EngineRequest,
    Finished,
    SessionEngine,
    Tokens,
)
from afferent.errors import SessionLost
from afferent.proxy.request_scope import RequestScope
from afferent.types import Modality

_ATTEMPTS = 3
"""Attempts of an answer, each with a new sequence if the engine has lost the one before."""
_HEARD, _ANSWERED = b"h", b"a"
"""Begin of a mark: what the last message of the sequence is."""


class LiveSequence:
    """The engine's sequence of one session.

    Invariants:
        - ``_ids`` are the session's first items, in order, unless the sequence is stale;
          ``_digest`` is that of them and the instructions.
        - One request of the sequence runs at a time.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        engine: SessionEngine,
        session: LiveSession,
        session_id: str,
        *,
        most_items: Callable[[Modality], int],
    ) -> None:
        """Create it; nothing is sent to the engine.

        Args:
            most_items: Returns the most items of a modality in one request.
        """
        self._pipeline, self._engine = pipeline, engine
        self._session, self._id, self._most_items = session, session_id, most_items
        self._lock = asyncio.Lock()
        self._is_sought = len(session) > 0  # another frontend may have begun it
        self._ids: set[str] = set()
        self._instructions = ""
        self._digest = _digest("", ())
        self._role = ""  # of the last message
        self._is_open = False  # the last message is an answer, without what the template adds
        self._end_token: int | None = None  # that ended it
        self._is_stale = False
        self._num_parts = 0
        self.num_tokens = 0

    def removed(self, ids: Sequence[str]) -> None:
        """Note that items were removed."""
        self._is_stale |= not self._ids.isdisjoint(ids)

    def inserted(self) -> None:
        """Note that an item was added before the last one."""
        self._is_stale = True

    async def feed(self, own: RequestScope, share: Share, instructions: str) -> None:
        """Compute the items that are not in the sequence yet.

        Raises:
            Unavailable: Try again.
        """
        async with self._lock:
            await self._prepare(instructions)
            try:
                for batch in self._take_new(None):
                    await self._hear(own, share, batch)
            except BaseException:
                self._is_stale = True
                raise

    async def answer(
        self, request: GenerateRequest, own: RequestScope, answer_id: str, instructions: str
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of an answer to the items before it; see `Pipeline.run`.

        Args:
            request: The request without messages.
            answer_id: Id of the answer among the session's items.
        """
        async with self._lock:
            is_complete = has_output = False
            try:
                for left in reversed(range(_ATTEMPTS)):
                    await self._prepare(instructions)
                    try:
                        async with aclosing(self._try(request, own, answer_id)) as outputs:
                            async for output in outputs:
                                has_output |= not isinstance(output, PromptInfo)
                                yield output
                        break
                    except SessionLost:  # a new sequence can't continue an answer
                        self._is_stale = True
                        if has_output or not left:
                            raise
                is_complete = True
            finally:
                if is_complete:
                    self._ids.add(answer_id)
                    self._role, self._is_open = "assistant", True
                else:
                    self._is_stale = True

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Submit a request of the sequence, and count its tokens."""
        num_tokens, end_token = request.start + len(request.token_ids), None
        async with aclosing(self._engine.submit(request)) as events:
            async for event in events:
                match event:
                    case Tokens(token_ids):
                        num_tokens += len(token_ids)
                    case Finished(token_id=token_id):
                        end_token = token_id
                        num_tokens += token_id is not None
                        self.num_tokens, self._end_token = num_tokens, end_token
                yield event

    # Inner steps

    async def _prepare(self, instructions: str) -> None:
        """Begin again if the sequence can't be extended."""
        if self._is_stale or instructions != self._instructions:
            self._ids.clear()
            self._role, self._is_open, self._end_token = "", False, None
            self.num_tokens = 0
            self._instructions, self._is_stale = instructions, False
            self._digest = _digest(instructions, ())
        if self._is_sought:
            self._is_sought = False
            await self._seek()

    async def _seek(self) -> None:
        """Continue the engine's sequence, if it has one of the session's first items."""
        kept = await self._engine.find_session(self._id)
        digest, ids = self._digest, list[str]()
        for item in self._session if kept is not None else ():
            digest = _digest(digest, [item])
            ids.append(item.id)
            if kept is not None and kept.mark[1:] == digest:
                self._ids, self._digest = set(ids), digest
                self._role, self._is_open = item.turn.role, kept.mark[:1] == _ANSWERED
                self.num_tokens, self._end_token = kept.num_tokens, kept.end_token
                return

    async def _try(
        self, request: GenerateRequest, own: RequestScope, answer_id: str
    ) -> AsyncGenerator[Output, None]:
        *batches, last = self._take_new(answer_id) or [[]]
        for batch in batches:
            await self._hear(own, request.share, batch)
        messages = self._messages(last)
        asked = structs.replace(request, messages=tuple(messages))
        answer = self._session.get(answer_id)
        self._digest = _digest(self._digest, [*last, *([answer] if answer is not None else [])])
        place = self._place(_ANSWERED)
        async with aclosing(self._pipeline.run(asked, own, place)) as outputs:
            async for output in outputs:
                yield output

    async def _hear(self, own: RequestScope, share: Share, batch: Sequence[LiveItem]) -> None:
        messages, self._num_parts = self._messages(batch), self._num_parts + 1
        request = GenerateRequest(
            request_id=f"{own.id}-{self._num_parts}",
            messages=tuple(messages),
            share=share,
            template=TemplateOptions(begins_answer=False),
            max_tokens=1,
        )
        self._digest = _digest(self._digest, batch)
        await self._pipeline.hear(request, own, self._place(_HEARD))
        self._role, self._is_open = messages[-1].role, False

    def _place(self, kind: bytes) -> SequencePlace:
        return SequencePlace(
            session_id=self._id,
            start=self.num_tokens,
            after=self._role,
            is_open=self._is_open,
            end_token=self._end_token,
            submit=self.submit,
            mark=kind + self._digest,
        )

    def _messages(self, batch: Sequence[LiveItem]) -> list[Message]:
        messages = [item.turn.message for item in batch]
        if not self.num_tokens and self._instructions:
            messages.insert(0, Message("system", (TextPart(self._instructions),)))
        return messages

    def _new_items(self, answer_id: str | None) -> list[LiveItem]:
        """Return the items behind those of the sequence, up to an answer. O(these items)."""
        found: list[LiveItem] = []
        for item in self._session.newest():
            if item.id in self._ids:
                break
            found.append(item)
            if item.id == answer_id or (answer_id is None and item.status == "in_progress"):
                found.clear()
        found.reverse()
        return found

    def _take_new(self, answer_id: str | None) -> list[list[LiveItem]]:
        """Return the new items in batches; from now on, the removal of one is noted."""
        items = self._new_items(answer_id)
        self._ids.update(item.id for item in items)
        return self._batches(items)

    def _batches(self, items: Sequence[LiveItem]) -> list[list[LiveItem]]:
        """Divide items among requests, within the limits of one."""
        batches: list[list[LiveItem]] = []
        counts: Counter[Modality] = Counter()
        for item in items:
            more = Counter(part.modality for part in item.turn.message.media)
            is_full = any(counts[kind] + more[kind] > self._most_items(kind) for kind in more)
            if is_full or not batches:
                batches.append([])
                counts.clear()
            batches[-1].append(item)
            counts += more
        return batches


def _digest(before: str | bytes, items: Sequence[LiveItem]) -> bytes:
    """Return the digest of items behind others, or behind instructions.

    An id may be used again, but not at the same time.
    """
    found = keys.digest(before.encode()) if isinstance(before, str) else before
    for item in items:
        found = keys.digest(found + f"{item.arrived_s!r} {item.id}".encode())
    return found
