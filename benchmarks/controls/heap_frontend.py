"""A frontend that has everything on the heap: the whole body, the images, the features.

vLLM's API server and SGLang's tokenizer process work like this: they parse the body when it is
complete, decode base64 and images on a pool of threads, one image each, and make tensors on the
heap, under a hash of the content.

The baseline is faster than these: it uses Afferent's decoders and processor
(`benchmarks.preprocess` compares them with Pillow and Hugging Face's), which release the
interpreter's lock, and pybase64; it does not validate the JSON. vLLM's processor has one thread;
here each thread decodes and processes.
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
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.families.registry import AnyFamily


class HeapFrontend:
    """A frontend with ``num_threads`` that decode and process; the caller's thread parses."""

    def __init__(self, family: AnyFamily, *, num_threads: int) -> None:
        self._family, self._limits = family, Limits()
        self._threads = ThreadPoolExecutor(num_threads)

    async def features(self, body: bytes) -> list[dict[str, Any]]:
        """Return the features of each image of a chat completion's body, in order."""
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
        keys.digest(data)  # the key for a cache
        header = read_image_header(data, self._limits)
        image = decode_image(data, header, self._limits)
        specs = self._family.plan_exactly(header).specs
        features = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
        self._family.process(image, features)
        return features
