"""A steady load of many clients, from a process with a lower priority than the server's.

    python -m tests.end_to_end.steady URL SECONDS NUM_CLIENTS

Each client sends one request after another: a new picture, a known one, or a look at the metrics
or at the health. It prints a JSON object with the number of answers by kind and status.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter

import httpx2 as httpx
import numpy as np

from tests import plain_http
from tests.images import encoded, photo
from tests.server import ask, data_url

NICE = 10
_TIMEOUT_S = 120.0
_KINDS = ("new", "new", "known", "known", "known", "known", "metrics", "health")


def load(url: str, *, seconds: float, num_clients: int) -> dict[str, int]:
    """Load a server from another process; return the number of answers, such as ``new 200``."""
    command = [sys.executable, "-m", "tests.end_to_end.steady", url]
    command += [str(seconds), str(num_clients)]
    timeout_s = seconds + 2 * _TIMEOUT_S
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    return {str(name): int(number) for name, number in json.loads(done.stdout).items()}


async def _load(url: str, seconds: float, num_clients: int) -> Counter[str]:
    pictures = [encoded(photo(644, 364, seed=number), "JPEG", quality=82) for number in range(8)]
    loop, counts = asyncio.get_running_loop(), Counter[str]()
    end_s = loop.time() + seconds

    async def one(number: int, client: httpx.AsyncClient) -> None:
        rng, index = np.random.default_rng(number), 0
        while loop.time() < end_s:
            kind, index = str(rng.choice(_KINDS)), index + 1
            if kind in ("metrics", "health"):
                answer = await client.get(f"{url}/{kind}")
            else:
                picture = pictures[int(rng.integers(len(pictures)))]
                if kind == "new":  # decoders ignore bytes after the end of a JPEG
                    picture += f"{number} {index}".encode()
                body = ask([data_url(picture)], "Name it.", max_tokens=2)
                answer = await client.post(f"{url}/v1/chat/completions", json=body)
            counts[f"{kind} {answer.status_code}"] += 1

    limits = httpx.Limits(max_connections=None)
    async with plain_http.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
        await asyncio.gather(*(one(number, client) for number in range(num_clients)))
    return counts


if __name__ == "__main__":
    os.nice(NICE)
    where, how_long, how_many = sys.argv[1:]
    print(json.dumps(asyncio.run(_load(where, float(how_long), int(how_many)))))
