"""A frontend that keeps everything on the heap: the body as a whole, images, features.

vLLM's API server and SGLang's tokenizer process work so: the body is parsed when it is complete;
base64 and image are decoded on a pool of threads, one image each; the processor makes tensors on
the heap, under a hash of the content.

What it is spared: the decoders and the processor are ours (`benchmarks.preprocess` tells how much
faster they are than Pillow and Hugging Face's), they let go of the interpreter's lock, base64 is
pybase64's, and the JSON is not validated. vLLM's processor has one thread; here each thread decodes
and processes.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pybase64

from afferent import keys
from afferent.config import Limits
from afferent.media.decode.image import decode_image
from afferent.media.families.registry import AnyFamily
from afferent.media.headers.probe import probe_image


class HeapFrontend:
    """``num_threads`` decode and process; the caller's parses the body."""

    def __init__(self, family: AnyFamily, *, num_threads: int) -> None:
        self._family, self._limits = family, Limits()
        self._threads = ThreadPoolExecutor(num_threads)

    async def features(self, body: bytes) -> list[dict[str, Any]]:
        """Of each image of a chat completion's body, in order."""
        messages = msgspec.json.decode(body)["messages"]
        parts = [part for message in messages for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._one, url) for url in urls)
        )

    def close(self) -> None:
        self._threads.shutdown()

    def _one(self, url: str) -> dict[str, Any]:
        data = memoryview(pybase64.b64decode(url.partition(",")[2]))
        keys.digest(data)  # under which a cache would keep them
        header = probe_image(data, self._limits)
        image = decode_image(data, header, self._limits)
        specs = self._family.plan_exactly(header).specs
        features = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._family.process(image, features)
        return features
