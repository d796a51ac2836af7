"""Answer as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from afferent.builtin.pipeline.call import Reply
from afferent.builtin.pipeline.request import Output
from afferent.errors import DeadlineExceeded
from afferent.proxy.http_server.exchange import hang_up
from afferent.proxy.statuses import failure_of


class EventStream(StreamingResponse):
    """Closes its outputs and reports the outcome, also if the client left before the start."""

    def __init__(
        self,
        reply: Reply,
        head: Sequence[Output],
        outputs: AsyncGenerator[Output, None],
        *,
        deadline: float,
        headers: dict[str, str],
        on_end: Callable[[str], None],
    ) -> None:
        """Create it.

        Args:
            head: The first outputs, already awaited.
            outputs: The others.
            deadline: On the loop's clock. Later the client gets nothing more.
            on_end: Called once, with ``ok``, the code of an error, or ``client_gone``.
        """
        self._reply, self._head, self._outputs = reply, head, outputs
        self._deadline, self._on_end = deadline, on_end
        self._outcome = "client_gone"
        self._frames = self._write()
        headers = {**headers, "cache-control": "no-cache"}
        super().__init__(self._frames, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            """Send a message before the deadline.

            A message that need not wait for the client is sent even later, to report the deadline.
            """
            try:
                async with asyncio.timeout_at(self._deadline):
                    await send(message)
            except TimeoutError:
                self._outcome = DeadlineExceeded.code
                hang_up(scope)
                raise ClientDisconnect from None

        try:
            async with aclosing(self._outputs), aclosing(self._frames):
                with suppress(ClientDisconnect):
                    await super().__call__(scope, receive, send_in_time)
        finally:  # also if closing them has failed
            self._on_end(self._outcome)

    async def _write(self) -> AsyncGenerator[bytes, None]:
        reply = self._reply
        try:
            first = reply.begin()
            for early in self._head:
                first += reply.output(early)
            yield b"".join(first)
            while True:
                async with asyncio.timeout_at(self._deadline):
                    output = await anext(self._outputs, None)
                if output is None:
                    break
                if frames := reply.output(output):
                    yield b"".join(frames)
            yield b"".join(reply.finish())
            self._outcome = "ok"
        except Exception as error:
            failure = failure_of(error)
            self._outcome = failure.code
            yield b"".join(reply.fail(failure))
