"""A program with an offline vLLM, for `benchmarks.peers.offline`.

    python -m benchmarks.peers.offline_host SIDE MODEL [WAIT_MS]

Each line of its input is a list of paths, as JSON. It asks one question about each image, and
prints a line with the time that this took, without the time to read the files.
"""

from __future__ import annotations

import base64
import io
import itertools
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import pybase64
from blake3 import blake3
from PIL import Image

MARK: Final = "RESULT "
NUM_TOKENS: Final = 1
_NUM_THREADS: Final = 2
_ARENA_NBYTES: Final = 2 * 2**30
"""Arena of each side: pages that are used for the first time cost time."""
_OPTIONS: Final[dict[str, Any]] = {
    "use_tqdm": False,
    "chat_template_content_format": "openai",
}
_ARGUMENTS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}
_BEST: Final = {"mm_processor_cache_gb": 0}

Conversations = list[list[dict[str, Any]]]
Chat = Callable[[Sequence[bytes], Conversations], Sequence[Sequence[int]]]
"""Asks about the images of some files; returns the tokens of the answers."""


class Done(msgspec.Struct, frozen=True):
    """Line of the output; ``answers`` is a digest of all tokens."""

    wall_s: float
    answers: str = ""


def main(side: str, model: str, wait_ms: str = "0") -> None:
    chat = _SIDES[side](model, float(wait_ms) / 1e3)
    print(MARK, flush=True)
    for line in sys.stdin:
        paths = msgspec.json.decode(line, type=list[str])
        files = [Path(path).read_bytes() for path in paths]
        conversations = [_question(file) for file in files]
        start_s = time.perf_counter()
        answers = chat(files, conversations)
        wall_s = time.perf_counter() - start_s
        digest = blake3(repr([list(each) for each in answers]).encode()).hexdigest(length=8)
        print(MARK + msgspec.json.encode(Done(wall_s, digest)).decode(), flush=True)


def _stock(model: str, _: float) -> Chat:
    from vllm import LLM

    llm = LLM(model, **_ARGUMENTS)
    return lambda _, conversations: _asked(llm, conversations)


def _best(model: str, _: float) -> Chat:
    """Give vLLM images that threads have decoded."""
    from vllm import LLM

    llm = LLM(model, **_ARGUMENTS, **_BEST)

    def chat(files: Sequence[bytes], _: Conversations) -> Sequence[Sequence[int]]:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            images = pool.map(_decoded, files)
            return _asked(llm, [_question(image) for image in images])

    return chat


def _afferent(model: str, _: float) -> Chat:
    from afferent.vllm import LLM

    llm = LLM(model, num_workers=_NUM_THREADS, **_ARGUMENTS)
    return lambda _, conversations: _asked(llm, conversations)


def _waiting(model: str, wait_s: float) -> Chat:
    """Use an engine that only waits in the place of vLLM."""
    stand_in: Any = types.ModuleType("vllm")
    stand_in.LLM = lambda *_, **__: _WaitingLLM(wait_s)
    sys.modules["vllm"] = stand_in
    from afferent.vllm import LLM

    llm = LLM(model, num_workers=_NUM_THREADS, arena_nbytes=_ARENA_NBYTES)

    def chat(_: Sequence[bytes], conversations: Conversations) -> Sequence[Sequence[int]]:
        outputs = llm.chat(conversations, use_tqdm=False)
        return [[output.number] for output in outputs]

    return chat


def _engine_only(_: str, wait_s: float) -> Chat:
    """Run that engine alone."""

    def chat(_: Sequence[bytes], conversations: Conversations) -> Sequence[Sequence[int]]:
        llm = _WaitingLLM(wait_s)
        for each in conversations:
            llm.enqueue_chat([each])
        return [[output.number] for _ in conversations for output in llm.step()]

    return chat


def _pool_only(model: str, _: float) -> Chat:
    """Prepare the images alone, with all cores."""
    from afferent import Features

    features = Features(
        *(model,),
        where="pool",
        num_workers=_NUM_THREADS,
        backend="torchvision",
        arena_nbytes=_ARENA_NBYTES,
    )

    def chat(_: Sequence[bytes], conversations: Conversations) -> Sequence[Sequence[int]]:
        urls = (each[0]["content"][0]["image_url"]["url"] for each in conversations)
        sources = (pybase64.b64decode(url.partition(",")[2], validate=True) for url in urls)
        return [[number] for number, _ in enumerate(features.share_many(sources))]

    return chat


_SIDES: Final[dict[str, Callable[[str, float], Chat]]] = {
    "stock": _stock,
    "best": _best,
    "afferent": _afferent,
    "waiting": _waiting,
    "engine_only": _engine_only,
    "pool_only": _pool_only,
}


def _asked(llm: Any, conversations: Conversations) -> list[Sequence[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.chat(conversations, parameters, **_OPTIONS)
    return [output.outputs[0].token_ids for output in outputs]


def _question(image: bytes | Image.Image) -> list[dict[str, Any]]:
    part: dict[str, Any]
    if isinstance(image, bytes):
        url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
    else:
        part = {"type": "image_pil", "image_pil": image}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]


def _decoded(file: bytes) -> Image.Image:
    with Image.open(io.BytesIO(file)) as image:
        return image.convert("RGB")


class _WaitingLLM:
    """Stand-in for `vllm.LLM` and its engine: each request takes so long, one after another.

    The engine runs beside the program, as vLLM's does.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self.llm_engine = self
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue_chat(self, prompts: Sequence[Any], **_: Any) -> list[str]:
        """Add one prompt; return its id."""
        self._waiting.put(number := str(next(self._numbers)))
        return [number]

    def step(self) -> list[Any]:
        """Wait for the end of a request, and return its output."""
        number = self._ended.get()
        done = types.SimpleNamespace(finish_reason="length")
        output = types.SimpleNamespace(
            finished=True, request_id=number, number=int(number), outputs=[done]
        )
        return [output]

    def _run(self) -> None:
        while True:
            number = self._waiting.get()
            time.sleep(self._wait_s)
            self._ended.put(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
