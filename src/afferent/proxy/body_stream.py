"""Transfer of a request's body to a server of the upstream while the body arrives.

The transfer is a first attempt beside the usual way of a body, which is read, cut and checked as
always. The server gets the last bytes only if the checked body is the one of which it has got the
rest. In all other cases the connection is closed in the middle of the body, which no server takes
for a request (RFC 9112, 8), and the request goes the usual way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Final

from afferent.engines.upstream import BegunRequest, Upstream, UpstreamRequest
from afferent.errors import EngineUnavailable
from afferent.keys import PLACEMENT_NBYTES
from afferent.proxy.body import BodyReader
from afferent.telemetry.registry import counter
from afferent.types import KiB, MiB

_MAX_WAITING_NBYTES: Final = 256 * KiB
"""Bytes that wait for the server; beyond, the client has to wait."""
_MAX_EARLY_NBYTES: Final = MiB
"""Most bytes of a body before its server is known."""
_GRACE_S: Final = 1.0
"""Most seconds between the end of a body and its last bytes for the server. A request that waits
longer, such as at the gate, must not hold space of a server that an admitted request needs.
"""

STREAMED = counter(
    "afferent_upstream_streamed_bodies_total",
    "Bodies of which a server got the beginning while they arrived, by whether it got the end as "
    "well; if not, the request was refused, or its body was sent again, as a whole",
    outcome=("complete", "given_up"),
)

PlacementOf = Callable[[str, bytes], bytes]


class ArrivingBody:
    """Body of a known length that is sent once, while it arrives; see
    `afferent.engines.upstream.RepeatableBody`.

    Invariants:
        - `chunks` ends only after `finish`, and with ``nbytes`` bytes. In all other cases it
          raises, so that its connection is closed.
        - Until `finish`, the latest chunk is held back, and `chunks` yields fewer than ``nbytes``
          bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._held = b""
        self._waiting: list[bytes] = []
        self._is_finished = self._is_given_up = False
        self._changed = asyncio.Event()  # either side may wait for the other one, never both

    async def push(self, chunk: bytes) -> None:
        """Add the next bytes. Wait while too many bytes wait for the server."""
        if not chunk:
            return
        self._release_held()
        self._held = chunk
        while not self._is_given_up and sum(map(len, self._waiting)) > _MAX_WAITING_NBYTES:
            await self._next_change()

    def finish(self) -> None:
        """Let the server have the last bytes."""
        self._is_finished = True
        self._release_held()

    def give_up(self) -> None:
        """Break off."""
        self._is_given_up = True
        self._changed.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        left_nbytes = self.nbytes
        while not self._is_given_up:
            if self._waiting:
                sent = b"".join(self._waiting)
                left_nbytes -= len(sent)
                if left_nbytes <= 0 and not self._is_finished:
                    break
                self._waiting.clear()
                self._changed.set()
                yield sent
            elif not self._is_finished:
                await self._next_change()
            elif left_nbytes:
                break
            else:
                return
        raise EngineUnavailable("the body was not sent to its end")

    def _release_held(self) -> None:
        if self._held:
            self._waiting.append(self._held)
            self._held = b""
        self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class BodyStream:
    """Transfer of one body, from the time at which its first item decides on the server.

    Invariants:
        - ``_begun`` is the request with ``_body``; both exist, or neither.
        - ``_body`` is finished only by `complete`, and given up only by `close`.
    """

    def __init__(
        self,
        upstream: Upstream,
        request: UpstreamRequest,
        nbytes: int,
        placement_of: PlacementOf,
    ) -> None:
        """Create it.

        Args:
            request: The request, with neither its body nor its placement.
            nbytes: Announced length of the body.
            placement_of: Returns the placement of a body by the text before the base64 of its first
                item and the item's first 64 KiB; empty for a body that is not sent while it
                arrives.
        """
        self._upstream, self._request, self._nbytes = upstream, request, nbytes
        self._placement_of, self._placement = placement_of, b""
        self._early: list[bytes] = []
        self._body: ArrivingBody | None = None
        self._begun: BegunRequest | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_complete = self._is_closed = False

    async def follow(self, reader: BodyReader, chunk: bytes) -> None:
        """Pass on the next bytes, once their server is known.

        Args:
            reader: Reader of the body, which has read these bytes.
        """
        if self._is_closed:
            return
        body = self._body
        if body is None:
            self._early.append(chunk)
            body = self._begin(reader)
            if body is None:
                return
            chunk = b"".join(self._early)
            self._early.clear()
        await body.push(chunk)

    def end(self) -> None:
        """Note that the whole body has arrived: from now on, its last bytes must not wait long."""
        if self._begun is not None:
            self._timer = asyncio.get_running_loop().call_later(_GRACE_S, self.close)

    def complete(self, placement: bytes) -> BegunRequest | None:
        """Let the server have the last bytes: the checked body is the one that it has got.

        Args:
            placement: Placement of the checked body.

        Returns:
            The request; ``None`` if the transfer was given up, or the body belongs elsewhere.
        """
        if self._is_closed or self._body is None or placement != self._placement:
            return None
        self._is_complete = True
        self._stop_timer()
        self._body.finish()
        STREAMED.labels("complete").inc()
        return self._begun

    def close(self) -> None:
        """Close the connection to the server, unless the answer has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_timer()
        self._early.clear()
        if self._body is None or self._begun is None:
            return
        if not self._is_complete:
            STREAMED.labels("given_up").inc()
            self._body.give_up()
        self._begun.close()

    def _begin(self, reader: BodyReader) -> ArrivingBody | None:
        """Return the body on its way to a server; ``None`` while no server is known."""
        first = reader.first_item(PLACEMENT_NBYTES)
        if first is None:
            if sum(map(len, self._early)) > _MAX_EARLY_NBYTES:
                self.close()
            return None
        self._placement = self._placement_of(*first)
        if not self._placement:
            self.close()
            return None
        body = ArrivingBody(self._nbytes)
        request = replace(self._request, body=body, placement=self._placement)
        try:
            self._begun = self._upstream.begin(request, self._on_end)
        except EngineUnavailable:  # for a moment, perhaps: the usual way comes later
            self.close()
            return None
        self._body = body
        return body

    def _on_end(self) -> None:
        """Handle an answer that came before the end of the body, or a failure."""
        if not self._is_complete:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
