"""Media hosts whose answers take long to parse do not block the event loop."""

from __future__ import annotations

import asyncio

import pytest

from afferent.config import Limits
from afferent.errors import FetchFailed
from afferent.media.fetch.fetch import Fetcher
from tests.callbacks import Meter
from tests.collector import frozen
from tests.media.media_host import media_host, send_raw

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
NUM_CHUNKS = 60_000

FLOODS = {
    "interim": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100_000,
    "headers": OK + b"a: b\r\n" * 20_000 + b"\r\n",
    "header": OK + b"a: " + b"b" * 1_000_000 + b"\r\n\r\n",
    "chunks": CHUNKED + b"1\r\nx\r\n" * NUM_CHUNKS + b"0\r\n\r\n",
    "extensions": CHUNKED + b"1;" + b"a=b;" * 300_000,
    "trailers": CHUNKED + b"0\r\n" + b"a: b\r\n" * 200_000,
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods(name: str) -> None:
    async def fetch(where: str) -> bytes:
        fetcher = Fetcher(Limits(fetch_allow=(where,)), grace_s=60)
        session = fetcher.session(max_nbytes=1 << 20)
        try:
            return await session.fetch(f"http://{where}/", modality="image", max_nbytes=1 << 20)
        finally:
            await fetcher.close()

    async def main(where: str) -> bytes:
        with frozen(), meter.watching():
            return await fetch(where)

    meter = Meter()
    with media_host({"/": send_raw(FLOODS[name])}) as where:
        if name == "chunks":
            assert asyncio.run(main(where)) == b"x" * NUM_CHUNKS
        else:
            with pytest.raises(FetchFailed):
                asyncio.run(main(where))
    meter.check(name)
