"""What a server must offer to be stood in front of: it takes requests in its own API's words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from afferent.engine.references import Reference
from afferent.types import Modality

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRequest:
    """A request as it is passed on.

    Attributes:
        method: Such as ``POST``.
        target: Path and query, as they came.
        headers: Without those that are about the connection it came by.
        body: All of it, or piece by piece.
        keys: Content keys of its items: who has seen them may find them again.
    """

    method: str
    target: str
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    keys: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamAnswer:
    """An answer as it comes: ``chunks`` may be walked once, within the context it came by."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]


class UpstreamStats(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an upstream does now, and what it has done since it was started.

    Attributes:
        num_running: Requests that steps are done for.
        num_waiting: Requests that wait to be run.
        kv_in_use: The part of its memory for keys and values that is in use, 0 to 1; of several
            servers the largest.
        num_prompt_tokens: Of all prompts.
        num_tokens: Of all answers.
    """

    num_running: int
    num_waiting: int
    kv_in_use: float
    num_prompt_tokens: int
    num_tokens: int


class UpstreamSocket(Protocol):
    """A WebSocket to an upstream, which is open."""

    @property
    def subprotocol(self) -> str | None:
        """What the upstream has chosen."""

    @property
    def close_code(self) -> int:
        """Why it was closed, when it is."""

    async def send(self, message: str | bytes) -> None:
        """Raises: EngineUnavailable: It is closed."""
        ...

    def messages(self) -> AsyncIterator[str | bytes]:
        """What comes, until it is closed."""
        ...

    async def close(self, code: int) -> None:
        """Say why, and wait a moment for the answer."""
        ...


class Upstream(Protocol):
    """A server as a frontend sees it."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""

    @property
    def takes_any_file(self) -> bool:
        """Whether it decodes images of formats whose headers are not known here."""

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        """Whether it would make the same features of a file as are made here; if not, it is given
        the file.

        Args:
            modality: What the file stands for.
            file: All of it; ``None`` for an item that is known by its name alone, and may have
                been taken before.
        """
        ...

    @property
    def salt_key(self) -> bytes:
        """Secret that salts of the upstream's prefix cache are made with: the same in all frontends
        of a server.
        """

    def sign(self, reference: Reference) -> str:
        """The URL that stands for an item in a request's body."""
        ...

    def forward(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Pass a request on; to leave the context early is to abort it.

        Raises:
            EngineUnavailable: It is not there, or went away; retryable.
        """
        ...

    def connect(
        self, request: UpstreamRequest, subprotocols: Sequence[str]
    ) -> AbstractAsyncContextManager[UpstreamSocket]:
        """Open a WebSocket; to leave the context is to close it.

        Args:
            subprotocols: Of which the upstream may choose one.

        Raises:
            EngineUnavailable: It is not there; retryable.
            InvalidRequest: It takes no WebSocket there.
        """
        ...

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        """The text that it shows on its page of metrics, of each server by name; none, if it does
        not answer.
        """
        ...

    async def stats(self) -> UpstreamStats | None:
        """What its servers do now, all together; ``None`` if they don't say."""
        ...
