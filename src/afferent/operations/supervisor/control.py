"""Control socket of the supervisor: requests of operators to a running server.

A question is a line of JSON. The answer is one or more lines: all but the last show the progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec
from msgspec import Struct

from afferent.errors import AfferentError, ConfigError
from afferent.runtime import wire
from afferent.runtime.sockets import new_address

SOCKET_NAME: Final = "control"
MAX_LINE_NBYTES: Final = 1 << 16

What = Literal["frontends", "engine"]
Tell = Callable[[str], None]
Restart = Callable[[What, Tell], Awaitable[None]]


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    restart: What


class Progress(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of a restart: ``is_done`` in the last message; ``failed`` if it did not succeed."""

    text: str
    is_done: bool = False
    failed: bool = False


class Control:
    """Server of the control socket, for one question at a time; others get an error meanwhile."""

    def __init__(self, restart: Restart) -> None:
        """Answer questions with ``restart``, which raises a `ConfigError` if it fails."""
        self._restart, self._busy_with = restart, ""

    async def serve(self, listener: socket.socket) -> None:
        """Answer questions until cancelled."""
        server = await asyncio.start_unix_server(self._answer, sock=listener, limit=MAX_LINE_NBYTES)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(text: str, *, is_done: bool = False, failed: bool = False) -> None:
            progress = Progress(text=text, is_done=is_done, failed=failed)
            writer.write(msgspec.json.encode(progress) + b"\n")

        with contextlib.suppress(OSError, ValueError):  # it has left, or sent an endless line
            try:
                wire.check_peer(writer.get_extra_info("socket"))
                question = msgspec.json.decode(await reader.readline(), type=Question)
                await self._do(question, tell)
            except (AfferentError, msgspec.MsgspecError) as error:
                tell(str(error), is_done=True, failed=True)
            else:
                tell("done", is_done=True)
            await writer.drain()
        writer.close()

    async def _do(self, question: Question, tell: Tell) -> None:
        if self._busy_with:
            raise ConfigError(f"the server is restarting its {self._busy_with}; try again")
        self._busy_with = question.restart
        try:
            await self._restart(question.restart, tell)
        except OSError as error:  # an error of the server, not of this connection
            raise ConfigError(f"the server can't do it now: {error.strerror}") from error
        finally:
            self._busy_with = ""


def listen() -> socket.socket:
    """Listen in a folder that only this user may enter."""
    return wire.listen(new_address(SOCKET_NAME))
