"""Reader of a body that is a form: its space in the arena."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.requests import Request

from afferent.admission.gate import Gate
from afferent.config import RequestLimits
from afferent.media.body.form import FormType
from afferent.proxy.body import BodyReader
from afferent.proxy.media_locations import MEDIA_KEYS
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind

WINDOW = 64 << 10
NUM_WINDOWS = 210


def test_bytes_that_could_begin_a_boundary_fit_with_the_next_window() -> None:
    """The length is not announced; from 4 MiB on, the space may end just where a window does."""
    rng = np.random.default_rng(0)
    with StoreServer(64 * MiB, shares={ObjectKind.RAW: 1.0}) as server:
        for _ in range(16):
            ends = rng.random(NUM_WINDOWS) < 0.5
            windows = [bytes(WINDOW - 1) + (b"\r" if each else b"x") for each in ends]
            head = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
            file = b"".join(windows)
            asyncio.run(read(server.address, file, [head, *windows, b"\r\n--b--\r\n"]))


async def read(address: str, file: bytes, chunks: list[bytes]) -> None:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    messages.append({"type": "http.request", "body": b""})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    store = await AsyncDaemonStore.connect(address, name="test", writable=True)
    form, gate = FormType(b"b", "file"), Gate(store, timeout_s=5)
    reader = BodyReader(store, gate, "r", RequestLimits(), MEDIA_KEYS, form=form)
    body = await reader.read(Request({"type": "http", "headers": []}, receive))
    ((marker, raw),) = body.media.items()
    assert bytes(raw.bytes_in(store)) == file
    assert marker.encode() in body.json
    store.forget("r")
    await store.close()
