"""The baseline of `benchmarks.gate`: an API process, and an engine process that only waits.

    python -m benchmarks.controls.api_server FD

It works as vLLM, LMDeploy and SGLang do, by their published descriptions:

- the body is parsed whole;
- a few threads decode base64 and images (vLLM: 8), for all requests;
- one thread runs the processor (vLLM);
- tensors are on the heap, and go to the engine process over ZMQ, out of band of their message
  (vLLM; SGLang and LMDeploy pickle them, which copies once more);
- the number of running requests is not limited;
- the engine queues the tensors until their prefill.

The features are made by Afferent's code, as bytes, with each patch once. vLLM's are twice as large.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import uvicorn
import uvloop
from msgspec import Struct
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from afferent.media.decoded import Array, DecodedImage
from afferent.media.families.registry import AnyFamily
from afferent.runtime.process import ChildProcess, run_until_terminated
from benchmarks.controls import tensor_message
from benchmarks.controls.sockets import load_zmq

_NUM_MEDIA_THREADS = 8

Features = Mapping[str, Array]


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of either process; ``is_engine`` selects it.

    ``folder`` has their sockets; ``prefill_s`` is the time of one request.
    """

    is_engine: bool
    folder: str
    prefill_s: float
    listener_fd: int
    family: AnyFamily


class _Api:
    def __init__(self, settings: Settings) -> None:
        self._family = settings.family
        self._media = ThreadPoolExecutor(_NUM_MEDIA_THREADS)
        self._processor = ThreadPoolExecutor(1)
        self._to_engine = _socket("PUSH", settings, "requests", binds=False)
        self._from_engine = _socket("PULL", settings, "answers", binds=True)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/ready", self._ready),
            ]
        )

    async def receive_answers(self) -> None:
        """Receive answers until cancelled."""
        while True:
            self._waiting.pop(int(await self._from_engine.recv())).set_result(None)

    async def _ready(self, _: Request) -> Response:
        return Response()

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        parts = [part for message in body["messages"] for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        loop = asyncio.get_running_loop()
        images = await asyncio.gather(
            *(loop.run_in_executor(self._media, _decode, url) for url in urls)
        )
        features = await loop.run_in_executor(self._processor, self._process, images)
        number = next(self._numbers)
        answered = self._waiting[number] = loop.create_future()
        frames = tensor_message.encode([number, features])
        await self._to_engine.send_multipart(frames, copy=False)
        del body, parts, urls, images, features, frames  # only the engine has them until the answer
        await answered
        message = {"role": "assistant", "content": "yes"}
        return JSONResponse({"choices": [{"index": 0, "message": message}]})

    def _process(self, images: list[Image.Image]) -> list[Features]:
        return [self._process_one(image) for image in images]

    def _process_one(self, image: Image.Image) -> Features:
        picture = DecodedImage(np.asarray(image))
        specs = self._family.plan_exactly(picture.header).specs
        features = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._family.process(picture, features)
        return features


def _decode(url: str) -> Image.Image:
    data = base64.b64decode(url.partition(",")[2])
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


async def _run_api(child: ChildProcess, settings: Settings) -> None:
    settings.family.load()
    api = _Api(settings)
    answers = asyncio.create_task(api.receive_answers())
    config = uvicorn.Config(
        api.app(), log_config=None, access_log=False, http="httptools", lifespan="off"
    )
    child.report("HTTP", ready=True)
    try:
        await uvicorn.Server(config).serve(sockets=[socket.socket(fileno=settings.listener_fd)])
    finally:
        answers.cancel()


class _Engine:
    def __init__(self, settings: Settings) -> None:
        self._prefill_s = settings.prefill_s
        self._requests = _socket("PULL", settings, "requests", binds=True)
        self._answers = _socket("PUSH", settings, "answers", binds=False)
        self._queue: asyncio.Queue[tuple[int, list[Features]]] = asyncio.Queue()

    async def receive(self) -> None:
        """Receive and queue requests until cancelled."""
        while True:
            frames = await self._requests.recv_multipart(copy=False)
            self._queue.put_nowait(tensor_message.decode([frame.buffer for frame in frames]))
            del frames  # only the queue has them

    async def prefill(self) -> None:
        """Prefill one request after another until cancelled."""
        while True:
            number, features = await self._queue.get()
            await asyncio.sleep(self._prefill_s)
            del features
            await self._answers.send(str(number).encode())


async def _run_engine(child: ChildProcess, settings: Settings) -> None:
    engine = _Engine(settings)
    child.report("stub engine", ready=True)
    await run_until_terminated(engine.receive(), engine.prefill())


def _socket(kind: str, settings: Settings, name: str, *, binds: bool) -> Any:
    zmq = load_zmq()
    made = zmq.asyncio.Context.instance().socket(getattr(zmq, kind))
    address = f"ipc://{settings.folder}/{name}"
    if binds:
        made.bind(address)
    else:
        made.connect(address)
    return made


def main() -> None:
    child = ChildProcess.start()
    settings = child.settings(Settings)
    run = _run_engine if settings.is_engine else _run_api
    uvloop.run(run(child, settings))


if __name__ == "__main__":
    main()
