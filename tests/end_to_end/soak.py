"""A server under mixed load for an hour: does the private memory of a process grow?

    python -m tests.end_to_end.soak --minutes 60 --warm-up-minutes 10

The load has new and repeated images, videos, streams that are read to the end, streams whose client
disconnects, and requests that are refused. Each process is sampled under this load. Memory grows
while caches and allocators fill: it counts as flat if the median of the later half of the samples
after the warm-up is within 4 MB of the median of the earlier half. A process that was restarted
fails, too.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import psutil

from tests import plain_http
from tests.images import encoded, photo
from tests.media_files import make_video
from tests.server import Server, ask, data_url, wait_until

MOST_GROWTH_NBYTES = 4_000_000
_NUM_CLIENTS = 4
_NUM_SAMPLES = 120
_NUM_REPORTS = 12
_TIMEOUT_S = 120.0


@dataclass
class Growth:
    """Samples of one process's private memory, taken after the warm-up."""

    name: str
    nbytes: list[int] = field(default_factory=list)

    @property
    def grown_nbytes(self) -> int:
        """Return the median of the later samples minus the median of the earlier ones."""
        middle = len(self.nbytes) // 2
        earlier, later = self.nbytes[:middle], self.nbytes[middle:]
        return round(statistics.median(later) - statistics.median(earlier)) if earlier else 0

    @property
    def is_flat(self) -> bool:
        return abs(self.grown_nbytes) <= MOST_GROWTH_NBYTES


class Load:
    """Clients that each send one request after the other until they are stopped."""

    def __init__(self, url: str, *, seed: int) -> None:
        self._url, self._seed = url, seed
        self._stopped = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(_NUM_CLIENTS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def _run(self, number: int) -> None:
        draw = random.Random(self._seed * 1000 + number)
        known = [_new_image(draw) for _ in range(8)]
        with plain_http.Client(base_url=self._url, timeout=_TIMEOUT_S) as client:
            while not self._stopped.is_set():
                kind = draw.choice(KINDS)
                try:
                    status = str(kind(client, draw, known))
                except httpx.HTTPError as error:
                    status = type(error).__name__
                with self._lock:
                    self.outcomes[f"{kind.__name__} {status}"] += 1


Kind = Callable[[httpx.Client, random.Random, Sequence[str]], int]


def new_images(client: httpx.Client, draw: random.Random, _: Sequence[str]) -> int:
    return _post(client, ask([_new_image(draw) for _ in range(draw.randint(1, 4))], "Which?"))


def repeated_images(client: httpx.Client, draw: random.Random, known: Sequence[str]) -> int:
    return _post(client, ask(draw.sample(known, draw.randint(1, 4)), "Which?", max_tokens=8))


def new_video(client: httpx.Client, draw: random.Random, _: Sequence[str]) -> int:
    """Request a new video: decoders ignore the random bytes after the end of the file."""
    data = base64.b64encode(_video() + draw.randbytes(8)).decode()
    part = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    body = ask([], "What?", max_tokens=4)
    body["messages"][0]["content"].append(part)
    return _post(client, body)


def stream(client: httpx.Client, draw: random.Random, known: Sequence[str]) -> int:
    body = ask([draw.choice(known)], "Which?", stream=True, max_tokens=16)
    with client.stream("POST", _PATH, json=body) as answer:
        for _ in answer.iter_lines():
            pass
        return answer.status_code


def stream_that_is_left(client: httpx.Client, draw: random.Random, known: Sequence[str]) -> int:
    body = ask([draw.choice(known), _new_image(draw)], "Which?", stream=True, max_tokens=64)
    with client.stream("POST", _PATH, json=body) as answer:
        next(answer.iter_lines(), None)
        return answer.status_code


def refused(client: httpx.Client, draw: random.Random, known: Sequence[str]) -> int:
    wrong = [
        b"{",
        {"model": "nothing", "messages": []},
        ask(["data:image/png;base64,AAAA"], "Which?"),
        ask(["http://127.0.0.1:1/a.png"], "Which?"),
        ask([known[0][: len(known[0]) // 2]], "Which?"),
        ask([], "x" * 40_000),
    ]
    return _post(client, draw.choice(wrong))


KINDS: Sequence[Kind] = (
    *(new_images, repeated_images, repeated_images, stream, stream_that_is_left, refused),
    new_video,
)
_PATH = "/v1/chat/completions"


def _post(client: httpx.Client, body: Any) -> int:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return client.post(_PATH, **content).status_code


def _new_image(draw: random.Random) -> str:
    side = draw.choice((64, 160, 400, 900))
    picture = photo(side, side * 3 // 4, seed=draw.randrange(1 << 30))
    return data_url(encoded(picture, "JPEG", quality=80))


@functools.cache
def _video() -> bytes:
    return make_video(num_frames=12)


def private_nbytes(process: psutil.Process) -> int:
    """Return the memory that only this process has, without what it maps of the arena."""
    return sum(
        each.private_clean + each.private_dirty
        for each in process.memory_maps(grouped=False)
        if not each.path.startswith("/memfd:")
    )


def name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    return module.removeprefix("afferent.").removesuffix(".main")


def sample(server: Server, found: dict[int, Growth]) -> None:
    for process in [psutil.Process(server.popen.pid), *server.processes()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            growth = found.setdefault(process.pid, Growth(name_of(process)))
            growth.nbytes.append(private_nbytes(process))


def table(found: Mapping[int, Growth]) -> str:
    lines = [f"{'process':<34} {'pid':>8} {'first MB':>9} {'last MB':>9} {'grown MB':>9}"]
    for pid, each in found.items():
        first, last, grown = (n / 1e6 for n in (each.nbytes[0], each.nbytes[-1], each.grown_nbytes))
        verdict = "" if each.is_flat else "  <- not flat"
        lines.append(f"{each.name:<34} {pid:>8} {first:>9.2f} {last:>9.2f} {grown:>+9.2f}{verdict}")
    return "\n".join(lines)


def failures(found: Mapping[int, Growth], num_samples: int) -> list[str]:
    """Return the failures, a line each."""
    wrong = [f"{each.name} is not flat" for each in found.values() if not each.is_flat]
    wrong += [
        f"{each.name} did not live from the warm-up to the end"
        for each in found.values()
        if len(each.nbytes) != num_samples
    ]
    return wrong


def main() -> int:
    """Return the status of the run: 0 if the memory of all processes is flat."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--minutes", type=float, default=60.0, help="after the warm-up (60)")
    options.add_argument("--warm-up-minutes", type=float, default=10.0, help="not judged (10)")
    options.add_argument("--seed", type=int, default=1, help="of the load (1)")
    given = options.parse_args()
    found: dict[int, Growth] = {}
    # The caches fill during the warm-up; later growth is a leak.
    caches = ("--arena-nbytes", "128MiB", "--encoder-cache-nbytes", "8MiB")
    with Server(*caches, "--frontends", "2") as server:
        load = Load(server.url, seed=given.seed)
        load.start()
        try:
            time.sleep(given.warm_up_minutes * 60)
            start_s = time.monotonic()
            for number in range(_NUM_SAMPLES + 1):
                due_s = start_s + given.minutes * 60 * number / _NUM_SAMPLES
                time.sleep(max(0.0, due_s - time.monotonic()))
                sample(server, found)
                if number % (_NUM_SAMPLES // _NUM_REPORTS) == 0:
                    minutes = given.minutes * number / _NUM_SAMPLES
                    print(f"{minutes:.0f} of {given.minutes:.0f} minutes", file=sys.stderr)
        finally:
            load.stop()
        wait_until(lambda: server.metric("afferent_requests_in_flight") == 0)
        wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    print(table(found))
    for outcome, number in sorted(load.outcomes.items()):
        print(f"{number:>8} {outcome}")
    wrong = failures(found, _NUM_SAMPLES + 1)
    print("\n".join(wrong) or "the private memory of all processes is flat")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
