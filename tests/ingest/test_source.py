"""Where an item's bytes come from."""

from __future__ import annotations

import asyncio

import pytest

from afferent.config import ServeConfig
from afferent.errors import ForbiddenUrl, InvalidMedia
from afferent.ingest.fetch import Fetcher
from afferent.ingest.raw import RawBuffer
from afferent.ingest.source import read_media
from afferent.types import Modality


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("data:image/png;base64,aGVsbG8=", None),
        ("DATA:image/png;BASE64,aGVsbG8=", None),
        ("data:;base64,aGVsbG8=", None),
        ("data:;base64,aGVs\r\nbG8=\n", None),
        ("data:image/png;base64,aGVsbG8", InvalidMedia),
        ("data:image/png;base64,aGVs bG8=", InvalidMedia),
        ("data:image/png;base64,ä", InvalidMedia),
        ("data:image/png,hello", ForbiddenUrl),
        ("data:image/png;base64", ForbiddenUrl),
    ],
)
def test_data_urls(url: str, error: type[Exception] | None) -> None:
    limits = ServeConfig()

    async def main() -> bytes | None:
        fetcher = Fetcher(limits)
        try:
            media = await read_media(
                url,
                Modality.IMAGE,
                RawBuffer(None, "r"),  # type: ignore[arg-type]  # nothing comes into it
                limits=limits,
                fetches=fetcher.session(max_nbytes=1),
            )
        finally:
            await fetcher.close()
        assert (media.origin, media.handle) == ("data", None)
        return media.data

    if error is None:
        assert asyncio.run(main()) == b"hello"
    else:
        with pytest.raises(error):
            asyncio.run(main())


@pytest.mark.parametrize(
    "text", ["/9j/4AAQSkZJRgABAQAAAQABAAD/2wBD" * 9, "iVBORw0KGgoAAAANSUhEUgAA=="]
)
def test_base64_that_is_no_url(text: str) -> None:
    async def main() -> None:
        fetcher = Fetcher(ServeConfig())
        try:
            await read_media(
                text,
                Modality.IMAGE,
                RawBuffer(None, "r"),  # type: ignore[arg-type]  # nothing comes into it
                limits=ServeConfig(),
                fetches=fetcher.session(max_nbytes=1),
            )
        finally:
            await fetcher.close()

    with pytest.raises(ForbiddenUrl, match=r"put data:image/\.\.\.;base64, in front of it"):
        asyncio.run(main())
