"""Program of `test_offline.py`: `afferent.vllm.LLM` against the `vllm.LLM` inside of it."""

from __future__ import annotations

import base64
import io
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm import SamplingParams

from afferent.errors import ConfigError, InvalidMedia
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import MiB
from afferent.vllm import LLM

PARAMETERS = SamplingParams(temperature=0, max_tokens=6)
OPTIONS: dict[str, Any] = {"use_tqdm": False, "chat_template_content_format": "openai"}
ARENA_NBYTES = 2 * MiB
SMALL, LARGE = (120, 90), (1000, 800)


def encoded(seed: int, format: str = "JPEG", size: tuple[int, int] = SMALL) -> bytes:
    width, height = size
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 10, width // 10, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize(size).save(out, format)
    return out.getvalue()


def deep(seed: int) -> bytes:
    """Return a PNG with 16 bits of grey, which vLLM reads in its own way."""
    width, height = SMALL
    out = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 65536, (height, width), np.uint16)
    Image.fromarray(values).save(out, "PNG")
    return out.getvalue()


def url(data: bytes, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def conversation(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def answers(outputs: list[Any]) -> list[Any]:
    return [(each.prompt_token_ids, each.outputs[0].token_ids) for each in outputs]


def num_made(llm: LLM) -> int:
    with DaemonStore(str(llm._features.address), name="test") as store:
        return store.stat().num_jobs_made


def check_nothing_held(llm: LLM) -> None:
    """All pins end soon: the engine core drops those of a step a moment after it."""
    deadline_s = time.monotonic() + 10
    with DaemonStore(str(llm._features.address), name="test") as store:
        while store.stat().held_nbytes:
            assert time.monotonic() < deadline_s, store.list_clients()
            time.sleep(0.02)


def check_chat(llm: LLM, folder: Path) -> None:
    """All kinds of conversations, in one call, have the answers of vLLM itself, in order."""
    (folder / "0.jpg").write_bytes(encoded(0))
    image = {"type": "image_pil", "image_pil": Image.open(io.BytesIO(encoded(1)))}
    mixed = [
        *(conversation(url(encoded(seed))) for seed in range(12)),
        conversation(url(encoded(20)), url(encoded(21)), text="Compare them."),
        [{"role": "user", "content": "No image."}],
        conversation(f"file://{folder}/0.jpg"),
        [{"role": "user", "content": [image, {"type": "text", "text": "Which colour?"}]}],
        conversation(url(deep(30), "png")),
        conversation(url(encoded(31)), url(deep(30), "png")),
    ]
    before = num_made(llm)
    ours = llm.chat(mixed, PARAMETERS, **OPTIONS)
    assert num_made(llm) == before + 15, "one file comes twice, and vLLM decodes deep grey"
    stock = llm.llm.chat(mixed, PARAMETERS, **OPTIONS)
    assert answers(ours) == answers(stock)
    assert answers(llm.chat(mixed[0], PARAMETERS, **OPTIONS)) == answers(stock[:1])
    check_nothing_held(llm)


def check_generate(llm: LLM, folder: Path) -> None:
    text = llm.llm.chat(conversation(url(encoded(0))), PARAMETERS, **OPTIONS)[0].prompt
    (path := folder / "40.png").write_bytes(encoded(40, "PNG"))
    image = Image.open(path)
    theirs = [image, [Image.open(io.BytesIO(encoded(41)))], image]
    given = [image, [encoded(41)], path]

    def prompts(images: list[Any]) -> list[Any]:
        return [{"prompt": text, "multi_modal_data": {"image": each}} for each in images]

    parameters = [SamplingParams(temperature=0, max_tokens=number) for number in (2, 4, 6)]
    ours = llm.generate(prompts(given), parameters, use_tqdm=False)
    stock = llm.llm.generate(prompts(theirs), parameters, use_tqdm=False)
    assert answers(ours) == answers(stock)
    message = ""
    try:
        llm.generate(prompts(given), parameters[:2], use_tqdm=False)
    except ConfigError as error:
        message = error.message
    assert "2 elements for 3 prompts" in message


def check_invalid(llm: LLM) -> None:
    good = [conversation(url(encoded(seed))) for seed in range(50, 58)]
    bad = conversation(url(encoded(58)[:200]))
    for where in (0, 4, 8):
        try:
            llm.chat([*good[:where], bad, *good[where:]], PARAMETERS, **OPTIONS)
        except InvalidMedia:
            pass
        else:
            raise AssertionError("it was not refused")
        check_nothing_held(llm)
        assert not llm.llm.llm_engine.has_unfinished_requests()
    assert len(llm.chat(good, PARAMETERS, **OPTIONS)) == len(good)


def check_bounded(llm: LLM) -> None:
    """More images than the store has space for pass through it."""
    many = [conversation(url(encoded(seed, size=LARGE))) for seed in range(100, 140)]
    peak = [0]
    is_done = threading.Event()

    def watch() -> None:
        with DaemonStore(str(llm._features.address), name="watch") as store:
            while not is_done.wait(0.01):
                peak[0] = max(peak[0], store.stat().held_nbytes)

    thread = threading.Thread(target=watch)
    thread.start()
    ours = llm.chat(many, PARAMETERS, **OPTIONS)
    is_done.set()
    thread.join()
    assert 0 < peak[0] <= ARENA_NBYTES
    assert sum(llm._features.plan(LARGE).nbytes for _ in many) > ARENA_NBYTES
    assert answers(ours)[::7] == answers(llm.llm.chat(many[::7], PARAMETERS, **OPTIONS))
    check_nothing_held(llm)


def check_killed(llm: LLM) -> None:
    """A store daemon that is killed in the middle costs no answer."""
    many = [conversation(url(encoded(seed))) for seed in range(200, 260)]
    before = num_made(llm)

    def kill() -> None:
        while num_made(llm) < before + 20:
            time.sleep(0.005)
        pool = llm._features._workplace._pool
        assert pool is not None
        os.kill(pool._server.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    ours = llm.chat(many, PARAMETERS, **OPTIONS)
    thread.join()
    assert answers(ours) == answers(llm.llm.chat(many, PARAMETERS, **OPTIONS))
    check_nothing_held(llm)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LLM(
            "shapes",
            num_workers=2,
            arena_nbytes=ARENA_NBYTES,
            allowed_local_media_path=name,
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            limit_mm_per_prompt={"image": 4, "video": 0},
        ) as llm:
            check_chat(llm, folder)
            check_generate(llm, folder)
            check_invalid(llm)
            check_bounded(llm)
            check_killed(llm)
        print("all checked")


if __name__ == "__main__":
    main()
