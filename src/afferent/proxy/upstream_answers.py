"""Answers of an upstream without the media handles in them, which are useless to a client.

Errors have media handles, and so have answers that repeat documents of the request.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Final

from afferent.engines.references import SCHEME
from afferent.engines.upstream import UpstreamAnswer

_SHOWN: Final = b"(media)"
_CHARACTERS: Final = rb"[A-Za-z0-9_=-]"
_SCHEME: Final = SCHEME.encode()
_PIECE: Final = re.compile(
    rb"%(scheme)s%(char)s*(?:\.\.\.%(char)s+)?|\.\.\.(%(char)s{4,})"
    % {b"scheme": _SCHEME, b"char": _CHARACTERS}
)
"""Media handle, whole or with its middle left out; or the rest behind an omitted part."""
_BEGUN: Final = re.compile(
    rb"(?:%(scheme)s%(char)s*(?:\.{1,3}|\.\.\.%(char)s+)?|\.{1,3}|\.\.\.%(char)s+|%(prefixes)s)\Z"
    % {
        b"scheme": _SCHEME,
        b"char": _CHARACTERS,
        b"prefixes": b"|".join(_SCHEME[:length] for length in range(len(_SCHEME) - 1, 0, -1)),
    }
)
"""End of a chunk that may begin a piece of a media handle."""


def without_references(answer: UpstreamAnswer, urls: Sequence[str]) -> UpstreamAnswer:
    """Return an answer with its media handles replaced by ``(media)``.

    Args:
        urls: Media handles of the request.
    """
    headers = [(name, value) for name, value in answer.headers if name.lower() != b"content-length"]
    found = [url.encode() for url in urls]

    def shown(piece: re.Match[bytes]) -> bytes:
        tail = piece[1]
        if tail is None:
            return _SHOWN
        return b"..." if any(tail in url for url in found) else piece[0]

    return replace(answer, headers=headers, chunks=_replaced(answer.chunks, shown))


async def _replaced(
    chunks: AsyncIterator[bytes], shown: Callable[[re.Match[bytes]], bytes]
) -> AsyncIterator[bytes]:
    held = b""
    async for chunk in chunks:
        held += chunk
        begun = _BEGUN.search(held)
        end = begun.start() if begun else len(held)
        if ready := _PIECE.sub(shown, held[:end]):
            yield ready
        held = held[end:]
    if held:
        yield _PIECE.sub(shown, held)
