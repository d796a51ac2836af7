from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from afferent.engines.upstream import UpstreamAnswer
from afferent.proxy.upstream_answers import without_references

pytestmark = pytest.mark.timeout(30)


def shown(*chunks: bytes) -> bytes:
    async def coming() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def main() -> bytes:
        headers = [(b"Content-Length", b"5"), (b"x-kind", b"green")]
        answer = UpstreamAnswer(status=400, headers=headers, chunks=coming())
        changed = without_references(answer, [URL])
        assert changed.headers == [(b"x-kind", b"green")]
        return b"".join([chunk async for chunk in changed.chunks])

    return asyncio.run(main())


URL = "afferent:Ab-_0123456789=="
TEXT = (
    b'a: {"url": "afferent:Ab-_0123456789=="} aff, afferent:Ab-...789==, '
    b"{'type': 'image_url', 'im...3456789=='}, afferent:Ab-...[truncated], so...forth afferent:A"
)
CLEAN = (
    b'a: {"url": "(media)"} aff, (media), '
    b"{'type': 'image_url', 'im...'}, (media)...[truncated], so...forth (media)"
)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 7, 11, 1000])
def test_references_are_replaced_however_they_come(nbytes: int) -> None:
    pieces = [TEXT[at : at + nbytes] for at in range(0, len(TEXT), nbytes)]
    assert shown(*pieces) == CLEAN


@pytest.mark.parametrize("text", [b"", b"afferent", b"Afferent only: a", b"a reference", b"..."])
def test_other_text_stays(text: bytes) -> None:
    assert shown(text) == text
