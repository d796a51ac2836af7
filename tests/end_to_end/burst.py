"""Many concurrent requests, from a process with a lower priority than the server's.

    python -m tests.end_to_end.burst URL NUM_REQUESTS NUM_PICTURES

It prints a JSON list of ``[status, error code, retry-after]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import httpx2 as httpx
import numpy as np

from tests import plain_http
from tests.images import encoded, photo
from tests.server import ask, data_url

NICE = 10
DEADLINE_S = 300.0

Outcome = tuple[int, str, str]


def send(url: str, *, num_requests: int, num_pictures: int) -> list[Outcome]:
    """Run a burst in another process, and return the outcomes of its requests."""
    command = [sys.executable, "-m", "tests.end_to_end.burst", url]
    command += [str(num_requests), str(num_pictures)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S + 60)
    return [(status, code, after) for status, code, after in json.loads(done.stdout)]


async def _send_all(url: str, num_requests: int, num_pictures: int) -> list[httpx.Response]:
    rng = np.random.default_rng(1)
    pictures = [encoded(photo(644, 364, seed=n), "JPEG", quality=82) for n in range(8)]

    def body(number: int) -> dict[str, Any]:
        """Return a request with new pictures: decoders ignore bytes after the end of a JPEG."""
        urls = []
        for index in range(num_pictures):
            data = pictures[int(rng.integers(len(pictures)))] + f"{number} {index}".encode()
            urls.append(data_url(data))
        return ask(urls, "Name all pictures.", max_tokens=2)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with plain_http.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
        sends = [client.post(url, json=body(number)) for number in range(num_requests)]
        return await asyncio.gather(*sends)


def _outcome(response: httpx.Response) -> Outcome:
    code = "" if response.status_code == 200 else response.json()["error"]["code"]
    return response.status_code, code, response.headers.get("retry-after", "")


def main() -> None:
    os.nice(NICE)
    url, *numbers = sys.argv[1:]
    responses = asyncio.run(_send_all(url, *map(int, numbers)))
    print(json.dumps([_outcome(response) for response in responses]))


if __name__ == "__main__":
    main()
