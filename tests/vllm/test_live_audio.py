"""Live transcriptions of a real vLLM: equal to a stock one's, and limited."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.server import wait_until
from tests.vllm.servers import Stock, supervised
from tests.vllm.tiny_models import make_qwen3_asr

pytestmark = pytest.mark.vllm

RATE_HZ = 16_000
LENGTHS_S = (11.0, 5.0, 0.7)
"""The model takes five seconds at a time."""
MAX_S = 12
NAME = "asr"
ADMITTED = 'afferent_permits_taken{semaphore="live_audio"}'


def appended(seconds: float) -> list[dict[str, Any]]:
    """Return the events with audio, each of at most half a second."""
    samples = np.random.default_rng(round(10 * seconds)).normal(0, 0.2, round(seconds * RATE_HZ))
    data = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    pieces = (data[start : start + RATE_HZ] for start in range(0, len(data), RATE_HZ))
    return [
        {"type": "input_audio_buffer.append", "audio": base64.b64encode(piece).decode()}
        for piece in pieces
    ]


def connected(url: str) -> ClientConnection:
    return connect(url.replace("http:", "ws:") + "/v1/realtime", max_size=None)


def send(client: ClientConnection, events: Sequence[dict[str, Any]]) -> None:
    for event in events:
        client.send(json.dumps(event))


def received(client: ClientConnection, *, until: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] != until:
        found.append(json.loads(client.recv(120)))
    return found


def transcribed(
    client: ClientConnection, seconds: float, before_end: Callable[[], None] = lambda: None
) -> tuple[str, list[str], Any]:
    """Transcribe audio; return the text, the errors and the usage."""
    begin: list[dict[str, Any]] = [
        {"type": "session.update", "model": NAME},
        {"type": "input_audio_buffer.commit"},
    ]
    end = {"type": "input_audio_buffer.commit", "final": True}
    send(client, [*begin, *appended(seconds)])
    before_end()
    send(client, [end])
    *events, done = received(client, until="transcription.done")
    deltas = [event["delta"] for event in events if event["type"] == "transcription.delta"]
    errors = [event["code"] for event in events if event["type"] == "error"]
    assert "".join(deltas) == done["text"]
    return done["text"], errors, done["usage"]


def test_transcriptions_are_those_of_a_stock_vllm(tmp_path: Path) -> None:
    make_qwen3_asr(tmp_path)
    with Stock(tmp_path, "--served-model-name", NAME) as stock, connected(stock.url) as client:
        received(client, until="session.created")
        expected = [transcribed(client, seconds) for seconds in LENGTHS_S]
    assert all(text and not errors for text, errors, _ in expected)
    limits = ("--max-audio-s", str(MAX_S), "--served-model-name", NAME)
    with (
        supervised(*limits, model=tmp_path) as server,
        connected(server.url) as client,
    ):
        received(client, until="session.created")
        found = [transcribed(client, seconds) for seconds in LENGTHS_S]
        assert found == expected, "more than the limit in all, but not in one transcription"
        wait_until(lambda: server.metrics()[ADMITTED] == 0)
        text, errors, _ = transcribed(
            client, MAX_S + 0.8, lambda: wait_until(lambda: server.metrics()[ADMITTED] > 0)
        )
        assert errors == ["media_too_large"] * 2
        assert text
        wait_until(lambda: server.metrics()[ADMITTED] == 0)
