"""Interface of a server behind Afferent that takes requests in its own API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from afferent.engines.references import Reference
from afferent.types import Modality

Headers = Sequence[tuple[bytes, bytes]]
NameOf = Callable[[Modality, "bytes | memoryview"], bytes]


@runtime_checkable
class RepeatableBody(Protocol):
    """Body in pieces that may be sent again, until the answer begins."""

    @property
    def nbytes(self) -> int:
        """Size of the body."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body from its beginning.

        Raises:
            StoreRestarted: Its media were lost.
        """
        ...


@runtime_checkable
class NamedBody(RepeatableBody, Protocol):
    """Body whose items have names: a server that has got an item before needs its name alone."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the items that can be left out."""

    def without(self, names: Collection[str]) -> RepeatableBody:
        """Return the body with the names of these items in place of their data."""
        ...


class BegunRequest(Protocol):
    """Request that a server gets while its body arrives."""

    def close(self) -> None:
        """Close the connection, unless the answer has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRequest:
    """Request as it is forwarded.

    Attributes:
        method: HTTP method, such as ``POST``.
        target: Path and query, as they came.
        headers: Headers without those about the client's connection.
        body: The whole body, or its pieces.
        placement: Requests with the same value share results in a server's caches; empty for none.
        begun: The same request, of which a server has got the body already. If it fails, the body
            goes to another server.
    """

    method: str
    target: str
    headers: Headers
    body: bytes | RepeatableBody | AsyncIterator[bytes]
    placement: bytes = b""
    begun: BegunRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamAnswer:
    """Answer as it arrives: ``chunks`` may be iterated once, within the context that yielded it."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]


class UpstreamStats(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Current state of an upstream, and its counts since its start.

    Attributes:
        num_running: Requests that take part in steps.
        num_waiting: Requests that wait to be run.
        kv_in_use: The part of its KV cache that is in use, 0 to 1; the largest one of several
            servers.
        num_prompt_tokens: Tokens of all prompts.
        num_tokens: Tokens of all answers.
    """

    num_running: int
    num_waiting: int
    kv_in_use: float
    num_prompt_tokens: int
    num_tokens: int


class UpstreamSocket(Protocol):
    """Open WebSocket to an upstream."""

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that the upstream has chosen."""

    @property
    def close_code(self) -> int:
        """The close code, once it is closed."""

    async def send(self, message: str | bytes) -> None:
        """Send a message.

        Raises:
            EngineUnavailable: It is closed.
        """
        ...

    def messages(self) -> AsyncIterator[str | bytes]:
        """Yield the messages that arrive, until it is closed."""
        ...

    async def close(self, code: int) -> None:
        """Send a close code, and wait a moment for the answer."""
        ...


class Upstream(Protocol):
    """Server as a frontend sees it."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""

    @property
    def reads_arena(self) -> bool:
        """Whether it reads media in the arena, by references. If not, their bytes are written into
        the bodies of requests, and features are files that replace them.
        """

    @property
    def num_servers(self) -> int:
        """Number of its servers that take requests now."""

    @property
    def takes_salt(self) -> bool:
        """Whether its prefix cache keeps requests apart by their ``cache_salt``."""

    @property
    def takes_names(self) -> bool:
        """Whether its servers find an item that they have got before by its name (``uuid``) alone,
        in chat completions. Only where it reads no arena.
        """

    @property
    def min_streamed_nbytes(self) -> int:
        """Size of the smallest body that it gets while the body arrives; 0: it gets none so. Only
        where it reads no arena.
        """

    @property
    def takes_any_file(self) -> bool:
        """Whether it decodes images of formats whose headers are unknown here."""

    @property
    def takes_videos(self) -> bool:
        """Whether it gets videos, as far as is known. If not, it gets their frames as images."""

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        """Whether it would compute the features of a file that are computed here; if not, it gets
        the file.

        Args:
            modality: Modality of the item.
            file: The whole file; ``None`` for an item that is known by its name alone, and may have
                been taken before.
        """
        ...

    @property
    def name_of(self) -> NameOf | None:
        """Function that returns the name of a file in the upstream's caches, of at most 64 bytes.

        It is called, in any thread, for images without options, of which features may be made. An
        empty name, or no function: the name is the key of the features.
        """

    @property
    def salt_key(self) -> bytes:
        """Secret key for the salts of the upstream's prefix cache: the same in all frontends of a
        server.
        """

    def sign(self, reference: Reference) -> str:
        """Return the URL that replaces an item in a request's body."""
        ...

    def begin(self, request: UpstreamRequest, on_end: Callable[[], None]) -> BegunRequest:
        """Begin to send a request whose body still arrives, to one server.

        The caller passes the result to `forward`, with the whole body, or closes it.

        Args:
            on_end: Called when the server answers, or has failed.

        Raises:
            EngineUnavailable: The upstream is not running; retryable.
        """
        ...

    def forward(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Forward a request; leaving the context early aborts it.

        Raises:
            EngineUnavailable: The upstream is not running, or went away; retryable.
        """
        ...

    def connect(
        self, request: UpstreamRequest, subprotocols: Sequence[str]
    ) -> AbstractAsyncContextManager[UpstreamSocket]:
        """Open a WebSocket; leaving the context closes it.

        Args:
            subprotocols: Subprotocols; the upstream may choose one.

        Raises:
            EngineUnavailable: The upstream is not running; retryable.
            InvalidRequest: It takes no WebSocket at this path.
        """
        ...

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        """Return the metrics page of each server, by the server's name; servers that do not answer
        are left out.
        """
        ...

    async def stats(self) -> UpstreamStats | None:
        """Return the statistics of all its servers together; ``None`` if they report none."""
        ...
