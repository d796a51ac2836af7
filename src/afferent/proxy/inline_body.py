"""Body of a request with its media as base64, read from the arena while it is sent."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pybase64

from afferent.media.families.reencoded import FILE
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Handle

_BEFORE: Final = b'{"url":"'
_BEHIND: Final = b'"}'
_NULL: Final = b"null"
_WINDOW_NBYTES: Final = 3 << 16
"""Bytes that are encoded at a time; a multiple of 3, so that the pieces are one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineMedia:
    """Item to write into a body.

    Attributes:
        handle: Object with its bytes, pinned until the answer begins.
        start: Offset of the bytes in the object.
        nbytes: Number of its bytes.
        media_type: Such as ``image/png``.
        is_features: The object has features, which are the file of a `ReencodedFamily`.
        is_text: The bytes are the text behind ``data:video/jpeg;base64,``.
        name: Its name for servers that have got it before; empty for none.
    """

    handle: Handle
    start: int
    nbytes: int
    media_type: str
    is_features: bool = False
    is_text: bool = False
    name: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of its base64."""
        return self.nbytes if self.is_text else (self.nbytes + 2) // 3 * 4

    @property
    def head(self) -> str:
        """Begin of its ``data:`` URL."""
        return head_of(self.media_type)


def head_of(media_type: str) -> str:
    """Return the begin of a ``data:`` URL."""
    return f"data:{media_type};base64,"


class Markers:
    """Strings that stand for the base64 of items in a body, until it is sent. No client knows them.

    They have letters and digits only, so that JSON has them as they are.
    """

    def __init__(self) -> None:
        self._token = f"afferentinline{secrets.token_hex(16)}"

    def __getitem__(self, index: int) -> str:
        return f"{self._token}x{index}x"

    def whole(self, index: int) -> str:
        """Return the string that stands for a whole value."""
        return f"{self._token}w{index}w"

    def split(self, body: bytes) -> list[bytes | int]:
        """Return a body in pieces: JSON, and the indices of items between them."""
        token = self._token
        pieces: list[bytes | int] = []
        end = 0
        for found in re.finditer(f'{token}x([0-9]+)x|"{token}w([0-9]+)w"'.encode(), body):
            pieces += [body[end : found.start()], int(found[1] or found[2])]
            end = found.end()
        return [*pieces, body[end:]]


class InlineBody:
    """See `afferent.engines.upstream.RepeatableBody`."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        pieces: Sequence[bytes | int],
        media: Sequence[InlineMedia],
        left_out: Collection[str] = (),
    ) -> None:
        """Create it.

        Args:
            pieces: JSON, and indices of items. An item with a name stands there as a whole value,
                its object with a URL, and another one as base64.
            media: The items.
            left_out: Names of the items whose value is ``null``.
        """
        self._store, self._media, self._left_out = store, media, left_out
        self._pieces = [piece for piece in pieces if piece != b""]

    @property
    def names(self) -> frozenset[str]:
        """See `afferent.engines.upstream.NamedBody`."""
        return frozenset(item.name for item in self._media if item.name)

    def without(self, names: Collection[str]) -> InlineBody:
        """See `afferent.engines.upstream.NamedBody`."""
        return InlineBody(self._store, self._pieces, self._media, names)

    @property
    def nbytes(self) -> int:
        return sum(
            self._num_chars(self._media[piece]) if isinstance(piece, int) else len(piece)
            for piece in self._pieces
        )

    def _num_chars(self, item: InlineMedia) -> int:
        if not item.name:
            return item.num_chars
        if item.name in self._left_out:
            return len(_NULL)
        return len(_BEFORE) + len(item.head) + item.num_chars + len(_BEHIND)

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
                continue
            item = self._media[piece]
            if item.name and item.name in self._left_out:
                yield _NULL
                continue
            if item.name:
                yield _BEFORE + item.head.encode()
            for start in range(0, item.nbytes, _WINDOW_NBYTES):
                yield self._window(item, start)
            if item.name:
                yield _BEHIND

    def _window(self, item: InlineMedia, start: int) -> bytes:
        """Return a part of an item's text. No view of the arena lasts beyond it."""
        block = self._store.block(item.handle)
        end = min(start + _WINDOW_NBYTES, item.nbytes)
        if item.is_features:
            tree: Any = codec.view(block)
            window = memoryview(tree[FILE])[start:end]
        else:
            window = block[item.start + start : item.start + end]
        return bytes(window) if item.is_text else pybase64.b64encode(window)
