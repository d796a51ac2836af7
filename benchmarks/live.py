"""Cost of live sessions and of requests with very many images, beside their number.

The model is that of `training/one_token.py`, with random weights: it has one layer, and each frame
adds three tokens. A step is a question and its answer of at most four tokens. Steps of a session
alternate with those of another one with 100 frames (*short*), and ``ratio`` is that of the
processor times of each pair: so the machine's load at that time does not matter. Sides:

- *whole*: frames without a window, as fast as the server takes them, 16 on their way; a question
  after each 60 frames, which is 30 s of a camera with 2 frames a second. 7,200 frames are an hour.
- *window*: the same with a window of 120 items, which is a minute.
- *request*: one chat completion of as many images, of which 64 are different.
- *resume*: the frontend of a session is killed, and the session continues on another one, which
  answers a question. ``created_ms`` is the time from the new connection to ``session.created``, and
  ``answer_ms`` to the end of the answer.
- *real*: 2 frames a second in real time, with a question each 30 s. A frame's delay is the time
  until ``conversation.item.done`` beyond the decoding of its JPEG by Pillow.

A sample is one step, one request or one frame. ``model`` is the processor time of the engine's
worker, ``rest`` that of all other processes of the server. Memory is private (USS), of all
processes.

Expected before the measurement:

- *whole*: at 7,200 frames ``rest_ratio`` is at most 1.1, and ``ratio`` at most 1.2. ``model`` grows
  with the tokens that attention reads: by 1 ms for 21,600 tokens. Memory grows by 1 KiB a frame:
  0.4 KiB of KV cache, and the rest objects.
- *window*: all is flat; memory grows by less than 1 MiB.
- *request*: 0.1 ms of ``rest`` an image at each number; ``model`` grows with the square.
- *resume*: a whole answer after 700 ms at 7,200 frames, as 400 ms were measured at 4,000.
- *real*: a p99 of 30 ms on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import websockets
from PIL import Image

from benchmarks.record import BusyMeter, Goal, Report, Row
from tests.builtin.live import Live, connected, text_part
from tests.images import encoded
from tests.server import Server, ask, data_url, wait_until
from training import one_token

QUESTION = "What does a frame, a question or an image cost beside the number of earlier ones?"
COLUMNS = (
    *("side", "number", "step_ms", "model_ms", "rest_ms"),
    *("ratio", "rest_ratio", "frame_model_ms", "frame_rest_ms", "delay_ms", "memory_mib"),
    *("created_ms", "answer_ms"),
)
_SIDES = ("whole", "window", "request", "real", "resume")
_NUM_STEPS = 12
_NUM_PICTURES = 64
_ON_THEIR_WAY = 16
_FRAMES_A_QUESTION = 60
_FRAMES_A_MINUTE, _FRAMES_AN_HOUR = 120, 7_200
_SHORT = 100
_MOST_DELAY_MS, _MOST_GROWTH_MIB, _MOST_RATIO = 50.0, 16.0, 1.2
_MOST_RESUME_MS, _NUM_RESUMED = 1000.0, 7
_ANSWER: dict[str, Any] = {"temperature": 0, "max_output_tokens": 4}
_WORKER = "afferent.builtin.engine.worker"

AfterSample = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Cost:
    """Milliseconds of the processor, and of the clock."""

    model_ms: float
    rest_ms: float
    wall_ms: float

    @property
    def cpu_ms(self) -> float:
        return self.model_ms + self.rest_ms


class _Meter:
    """Processor time and memory of a server's processes."""

    def __init__(self, server: Server) -> None:
        processes = psutil.Process(server.popen.pid).children(recursive=True)
        self._worker = [each for each in processes if _is_worker(each)]
        self._others = [each for each in processes if each not in self._worker]

    def now(self) -> _Cost:
        return _Cost(_cpu_ms(self._worker), _cpu_ms(self._others), 1e3 * time.perf_counter())

    def since(self, before: _Cost) -> _Cost:
        now = self.now()
        return _Cost(
            now.model_ms - before.model_ms,
            now.rest_ms - before.rest_ms,
            now.wall_ms - before.wall_ms,
        )

    @property
    def memory_mib(self) -> float:
        processes = [*self._worker, *self._others]
        return sum(each.memory_full_info().uss for each in processes) / 2**20


def _is_worker(process: psutil.Process) -> bool:
    return any(part.startswith(_WORKER) for part in process.cmdline())


def _cpu_ms(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time of all threads; more exact than the ticks of ``/proc/PID/stat``."""
    tasks = [task for each in processes for task in Path(f"/proc/{each.pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sides", nargs="+", choices=_SIDES, default=list(_SIDES))
    parser.add_argument(
        "--numbers",
        type=int,
        nargs="+",
        default=[100, 1_000, 7_200],
        help="frames of sessions, and images of requests, at which to measure",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the side real")


def num_steps(*, quick: bool, sides: Sequence[str], numbers: Sequence[int], minutes: float) -> int:
    del minutes
    num_rows = len(_within(numbers, quick=quick))
    return sum(1 if side == "real" else num_rows for side in sides)


def _within(numbers: Sequence[int], *, quick: bool) -> list[int]:
    return sorted({min(number, 400) for number in numbers} if quick else numbers)


def run(
    *,
    quick: bool,
    after_sample: AfterSample,
    sides: Sequence[str],
    numbers: Sequence[int],
    minutes: float,
) -> Report:
    """Run the benchmark; ``quick`` does 400 frames at most, and six real seconds."""
    numbers, minutes = _within(numbers, quick=quick), 0.1 if quick else minutes
    report, meter = Report("live", QUESTION), BusyMeter()
    for side in sides:
        with _server(max(numbers), 2 if side == "resume" else 1) as server:
            if side == "request":
                _requests(server, numbers, report, after_sample)
            elif side == "real":
                asyncio.run(_real(server, minutes, report))
                after_sample()
            elif side == "resume":
                for number in numbers:
                    num_resumed = 1 if quick else _NUM_RESUMED
                    asyncio.run(_resume(server, number, num_resumed, report))
                    after_sample()
            else:
                window = {"items": _FRAMES_A_MINUTE} if side == "window" else None
                asyncio.run(_session(server, side, window, numbers, report, after_sample))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


@contextlib.contextmanager
def _server(most: int, num_frontends: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = one_token.make_tokenizer()
        path = Path(folder) / "one-token"
        one_token.save(path, tokenizer, one_token.make_model(tokenizer))
        limits = ("--max-images", f"{most + 1}", "--max-parts", f"{most + 16}")
        options = (*limits, "--max-json-nbytes", "16MiB", "--frontends", str(num_frontends))
        with Server("--model", str(path), *options) as server:
            yield server


def _pictures(kind: str, side: int = one_token.SIDE) -> list[bytes]:
    rng = np.random.default_rng(0)
    drawn = (rng.integers(0, 256, (side, side, 3)).astype(np.uint8) for _ in range(_NUM_PICTURES))
    return [encoded(Image.fromarray(pixels), kind) for pixels in drawn]


def _frames(pictures: Sequence[bytes], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the events of new frames, for ever."""
    urls = [data_url(each, kind) for each in pictures]
    while True:
        for url in urls:
            part = {"type": "input_image", "image_url": url}
            item = {"type": "message", "role": "user", "content": [part]}
            yield {"type": "conversation.item.create", "item": item}


# Sessions


async def _session(
    server: Server,
    side: str,
    window: dict[str, int] | None,
    numbers: Sequence[int],
    report: Report,
    after_sample: AfterSample,
) -> None:
    meter, frames, memory = _Meter(server), _frames(_pictures("PNG"), "png"), 0.0
    async with connected(server.url, model="one-token") as live:
        if window is not None:
            await live.send(type="session.update", session={"type": "realtime", "window": window})
        number = 0
        for end in numbers:
            before, start = meter.now(), number
            while number < end:
                most = min(_FRAMES_A_QUESTION, end - number)
                await _add(live, frames, most)
                number += most
                if number % _FRAMES_A_QUESTION == 0:
                    await _ask(live)
                if not memory and number >= _FRAMES_A_MINUTE:
                    memory = meter.memory_mib
            spent = meter.since(before)
            added = max(end - start, 1)
            frame = _Cost(spent.model_ms / added, spent.rest_ms / added, spent.wall_ms / added)
            memory_mib = meter.memory_mib
            async with connected(server.url, model="one-token") as short:
                await _add(short, frames, _SHORT)
                await _ask(short)
                pairs = [
                    (await _measured(live, meter), await _measured(short, meter))
                    for _ in range(_NUM_STEPS)
                ]
            costs = [cost for cost, _ in pairs]
            samples = {
                "step_ms": [each.cpu_ms for each in costs],
                "model_ms": [each.model_ms for each in costs],
                "rest_ms": [each.rest_ms for each in costs],
                "ratio": [cost.cpu_ms / short.cpu_ms for cost, short in pairs],
                "rest_ratio": [cost.rest_ms / short.rest_ms for cost, short in pairs],
                "frame_model_ms": [frame.model_ms],
                "frame_rest_ms": [frame.rest_ms],
                "wall_ms": [each.wall_ms for each in costs],
                "memory_mib": [memory_mib],
            }
            row = Row({"side": side, "number": end}, samples)
            report.rows.append(row)
            after_sample()
            for what in ("ratio", "rest_ratio") if end == numbers[-1] else ():
                ratio = row.median(what)
                goal = f"{side}: {what} at {end:,} items, at most {_MOST_RATIO:g}"
                report.goals.append(Goal(goal, ratio <= _MOST_RATIO, ratio))
            if end == _FRAMES_AN_HOUR:
                growth = memory_mib - memory
                goal = f"{side}: MiB more at {end:,} items, at most {_MOST_GROWTH_MIB:g}"
                report.goals.append(Goal(goal, growth <= _MOST_GROWTH_MIB, growth))


async def _add(live: Live, frames: Iterator[dict[str, Any]], number: int) -> None:
    """Add frames, with some on their way."""
    num_sent = num_done = 0
    while num_done < number:
        while num_sent < number and num_sent - num_done < _ON_THEIR_WAY:
            await live.send(**next(frames))
            num_sent += 1
        await live.until("conversation.item.done")
        num_done += 1
    live.events.clear()


async def _ask(live: Live) -> None:
    await live.add(text_part(one_token.QUESTION))
    response = await live.answer(**_ANSWER)
    if response.status not in ("completed", "incomplete"):
        raise RuntimeError(f"a question was answered with {response}")
    live.events.clear()


async def _measured(live: Live, meter: _Meter) -> _Cost:
    before = meter.now()
    await _ask(live)
    return meter.since(before)


async def _real(server: Server, minutes: float, report: Report) -> None:
    pictures, meter = _pictures("JPEG", side=256), _Meter(server)
    decode_ms = statistics.median(map(_decode_ms, pictures))
    frames, delays, memory = _frames(pictures, "jpeg"), list[float](), 0.0
    async with connected(server.url, model="one-token") as live:
        window = {"seconds": 60}
        await live.send(type="session.update", session={"type": "realtime", "window": window})
        start_s = time.monotonic()
        for number in range(round(minutes * _FRAMES_A_MINUTE)):
            await asyncio.sleep(max(0.0, start_s + number / 2 - time.monotonic()))
            sent_s = time.perf_counter()
            await live.send(**next(frames))
            await live.until("conversation.item.done")
            delays.append(1e3 * (time.perf_counter() - sent_s) - decode_ms)
            if number % _FRAMES_A_QUESTION == _FRAMES_A_QUESTION - 1:
                await _ask(live)
            if number == _FRAMES_A_MINUTE:
                memory = meter.memory_mib
    samples = {"delay_ms": delays, "memory_mib": [meter.memory_mib]}
    report.rows.append(Row({"side": "real", "number": len(delays)}, samples))
    report.notes.append(f"real: Pillow decodes a frame of 256 x 256 in {decode_ms:.2f} ms")
    p99 = float(np.quantile(delays, 0.99))
    goal = f"real: p99 of the delay in ms, at most {_MOST_DELAY_MS:g}"
    report.goals.append(Goal(goal, p99 <= _MOST_DELAY_MS, p99))
    if memory:
        growth = meter.memory_mib - memory
        goal = f"real: MiB more after the first minute, at most {_MOST_GROWTH_MIB:g}"
        report.goals.append(Goal(goal, growth <= _MOST_GROWTH_MIB, growth))


def _decode_ms(data: bytes) -> float:
    start_s = time.perf_counter()
    np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return 1e3 * (time.perf_counter() - start_s)


async def _resume(server: Server, number: int, num_resumed: int, report: Report) -> None:
    """Kill the frontend of a session again and again; each time, another one continues it."""
    samples: dict[str, list[float]] = {"created_ms": [], "answer_ms": []}
    async with connected(server.url, model="one-token") as live:
        await _add(live, _frames(_pictures("PNG"), "png"), number)
        await _ask(live)
        await _kill_frontend(server, live)
    for nth in range(num_resumed):
        start_s = time.perf_counter()
        async with connected(server.url, model="one-token", session_id=live.session_id) as again:
            samples["created_ms"].append(1e3 * (time.perf_counter() - start_s))
            items = number + 2 * (nth + 1)  # with the questions and their answers
            if (found := again.created.session.conversation_items) != items:
                raise RuntimeError(f"a session of {items} items has {found}")
            await _ask(again)
            samples["answer_ms"].append(1e3 * (time.perf_counter() - start_s))
            if nth < num_resumed - 1:
                await _kill_frontend(server, again)
    report.rows.append(Row({"side": "resume", "number": number}, samples))
    slowest = max(samples["answer_ms"])
    goal = f"resume: most ms to the answer at {number:,} items, at most {_MOST_RESUME_MS:g}"
    report.goals.append(Goal(goal, slowest <= _MOST_RESUME_MS, slowest))


async def _kill_frontend(server: Server, live: Live) -> None:
    """Kill the frontend of a session; wait until its successor serves."""
    num_ready = server.log().count("ready: HTTP")
    psutil.Process(live.frontend_of(server)).kill()
    with contextlib.suppress(websockets.ConnectionClosed):
        await live.until("none")
    wait_until(lambda: server.log().count("ready: HTTP") > num_ready)


# Requests


def _requests(
    server: Server, numbers: Sequence[int], report: Report, after_sample: AfterSample
) -> None:
    meter, pictures = _Meter(server), _pictures("PNG")
    urls, sizes = [data_url(each, "png") for each in pictures], []
    client = server.client().with_options(timeout=600)
    for number in numbers:
        asked = [urls[index % _NUM_PICTURES] for index in range(number)]
        body = {**ask(asked, f"{number}?", temperature=0, max_tokens=4), "model": "one-token"}
        sizes.append(f"{number:,}: {sum(map(len, asked)) / 1e6:.1f} MB of URLs")
        before = meter.now()
        answer = client.chat.completions.create(**body)
        cost = meter.since(before)
        if answer.usage is None or answer.usage.prompt_tokens < number:
            raise RuntimeError(f"{number} images were answered with {answer}")
        samples = {
            "step_ms": [cost.cpu_ms],
            "model_ms": [cost.model_ms],
            "rest_ms": [cost.rest_ms],
            "frame_model_ms": [cost.model_ms / number],
            "frame_rest_ms": [cost.rest_ms / number],
            "wall_ms": [cost.wall_ms],
            "memory_mib": [meter.memory_mib],
        }
        report.rows.append(Row({"side": "request", "number": number}, samples))
        after_sample()
    report.notes.append(f"request: {'; '.join(sizes)}")
