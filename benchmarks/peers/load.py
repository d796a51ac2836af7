"""Requests to a server by concurrent clients, with times and processor time."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from benchmarks.client import Client, clients
from benchmarks.pages import PageFiles
from benchmarks.peers.servers import MODEL, Side

_TIMEOUT_S = 300.0
_JPEG_QUALITY = 90


@dataclass(slots=True)
class Load:
    """Results of one side for a number of requests; ``cpu_ms`` is without its engine.

    ``queue_ms`` is the mean time for which vLLM's scheduler held a request; 0 if it was not asked.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    engine_cpu_ms: float
    queue_ms: float = 0.0


class Pages:
    """Bodies of requests, each with a new page, for an answer of one token.

    Args:
        are_mixed: Half of the pages are JPEGs; otherwise all are PNGs.
    """

    def __init__(self, width: int = 1275, height: int = 1650, *, are_mixed: bool = False) -> None:
        self._files, self._next = PageFiles(width, height), itertools.count()
        self._are_mixed = are_mixed

    def fresh(self, number: int) -> list[bytes]:
        return [self._body_of(next(self._next)) for _ in range(number)]

    def _body_of(self, number: int) -> bytes:
        png = self._files.page(number)
        if self._are_mixed and number % 4 >= 2:  # of each drawn page, as many
            return _body(_jpeg_of(png), "image/jpeg")
        return _body(png)


def bodies_of(pages: Pages, known: Sequence[bytes], number: int, *, are_new: bool) -> list[bytes]:
    """Return requests with new pages, or with the known ones in turn."""
    return (
        pages.fresh(number) if are_new else list(itertools.islice(itertools.cycle(known), number))
    )


def _jpeg_of(png: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).save(out, "JPEG", quality=_JPEG_QUALITY)
    return out.getvalue()


def _body(file: bytes, mime_type: str = "image/png") -> bytes:
    url = f"data:{mime_type};base64," + base64.b64encode(file).decode()
    part = f'{{"type":"image_url","image_url":{{"url":"{url}"}}}}'
    return (
        f'{{"model":"{MODEL}","max_tokens":1,"temperature":0,"messages":[{{"role":"user","content":'
        f'[{part},{{"type":"text","text":"What is this?"}}]}}]}}'
    ).encode()


def put_in_vllm(
    side: Side, path: str, bodies: Sequence[bytes], c: int, *, uds: str | None = None
) -> Load:
    """Do the same as `put` with a vLLM behind the side, and measure its queue, too."""
    before_s = side.queue_s()
    load = put(side, path, bodies, c, uds=uds)
    load.queue_ms = (side.queue_s() - before_s) / len(bodies) * 1e3
    return load


def put(side: Side, path: str, bodies: Sequence[bytes], c: int, *, uds: str | None = None) -> Load:
    """Send the requests and measure.

    Args:
        c: The number of clients, each of which waits for its answer.
        uds: The socket of the vLLM behind the side, to bypass Afferent.

    Raises:
        RuntimeError: An answer is not 200.
    """
    outside, engine = side.cpu_s()
    url = "http://vllm" if uds else side.url
    seconds, took_s = asyncio.run(post_all(url + path, bodies, c, uds=uds))
    ordered = sorted(seconds)
    outside_now, engine_now = side.cpu_s()
    return Load(
        requests_per_s=len(bodies) / took_s,
        p50_ms=statistics.median(ordered) * 1e3,
        p99_ms=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        cpu_ms=(outside_now - outside) / len(bodies) * 1e3,
        engine_cpu_ms=(engine_now - engine) / len(bodies) * 1e3,
    )


async def post_all(
    url: str, bodies: Sequence[bytes], c: int, *, uds: str | None = None
) -> tuple[list[float], float]:
    """Send all requests; return the seconds of each, and those of all. Answers are discarded.

    The clients have connected before.

    Raises:
        RuntimeError: An answer is not 200.
    """
    waiting: Iterator[bytes] = iter(bodies)
    seconds: list[float] = []

    async def work(client: Client) -> None:
        for body in waiting:
            start_s = time.monotonic()
            async with asyncio.timeout(_TIMEOUT_S):
                await client.post(body)
            seconds.append(time.monotonic() - start_s)

    async with clients(url, c, uds=uds) as opened:
        start_s = time.monotonic()
        await asyncio.gather(*map(work, opened))
        return seconds, time.monotonic() - start_s
