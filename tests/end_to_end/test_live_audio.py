"""Audio of live transcriptions in front of an upstream: limited, admitted, and passed on."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import websockets.sync.client
from websockets.sync.client import ClientConnection

from tests.end_to_end.standing_in import COMMIT
from tests.end_to_end.test_upstream import Front, standing
from tests.server import wait_until

SECOND_NBYTES = 2 * 16_000
MAX_S = 20
HEARD = 'afferent_media_bytes_total{modality="audio",origin="data"}'
ADMITTED = 'afferent_permits_taken{semaphore="live_audio"}'


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    limits = ("--max-audio-s", str(MAX_S), "--arena-nbytes", "8MiB", "--admission-timeout-s", "1")
    with standing(tmp_path_factory.mktemp("audio"), "shapes", *limits) as running:
        yield running


@contextlib.contextmanager
def talking(front: Front) -> Iterator[ClientConnection]:
    url = front.server.url.replace("http:", "ws:") + "/v1/realtime"
    with websockets.sync.client.connect(url, max_size=None) as client:
        yield client


def appended(client: ClientConnection, seconds: float) -> str | dict[str, Any]:
    """Send audio; return ``"passed"``, or the event that refuses it."""
    audio = base64.b64encode(bytes(int(seconds * SECOND_NBYTES))).decode()
    text = json.dumps({"type": "input_audio_buffer.append", "audio": audio})
    client.send(text)
    answer = client.recv(60)
    if answer == text * 2:
        return "passed"
    event: dict[str, Any] = json.loads(answer)
    return event


def complete(client: ClientConnection) -> None:
    client.send(COMMIT)
    assert json.loads(client.recv(60))["type"] == "transcription.done"


def test_audio_is_limited_until_its_transcription_is_complete(front: Front) -> None:
    before = front.server.metrics().get(HEARD, 0)
    with talking(front) as client:
        assert appended(client, 10) == "passed"
        assert appended(client, 8) == "passed"
        refused = appended(client, 4)
        assert isinstance(refused, dict)
        assert (refused["type"], refused["code"]) == ("error", "media_too_large")
        assert "--max-audio-s" in refused["error"]
        assert appended(client, 2) == "passed"
        complete(client)
        assert appended(client, 4) == "passed"
        for audio in ("=", "==", "===="):  # no audio takes anything back
            client.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            client.recv(60)
        client.send('{"type": "input_audio_buffer.append", "audio": 1}')  # for vLLM to refuse
        assert client.recv(60) == '{"type": "input_audio_buffer.append", "audio": 1}' * 2
    assert front.server.metrics()[HEARD] - before == pytest.approx(24 * SECOND_NBYTES, abs=8)


@pytest.mark.parametrize(
    "spelling",
    [
        '{"type": "input_audio_buffer\\u002eappend", "audio": "%s"}',
        '{"type": "input_audio_buffer.append", "audio": "%s", "x": NaN}',
        '{"type": "no", "type": "input_audio_buffer.append", "audio": "", "audio": "%s"}',
        '{"type": "input_audio_buffer.append", "\\u0061udio": "%s", "x": 1e999}',
    ],
)
def test_no_spelling_of_an_event_passes_by_the_limit(front: Front, spelling: str) -> None:
    text = spelling % base64.b64encode(bytes((MAX_S + 1) * SECOND_NBYTES)).decode()
    assert json.loads(text)["type"] == "input_audio_buffer.append"  # as vLLM reads it
    with talking(front) as client:
        client.send(text)
        assert json.loads(client.recv(60))["code"] == "media_too_large"


def test_many_short_events_are_charged_for_their_number(front: Front) -> None:
    with talking(front) as client:
        assert appended(client, MAX_S - 0.02) == "passed"  # 320 samples are left: five events
        answers = [appended(client, 1 / 16_000) for _ in range(6)]
    assert answers[:5] == ["passed"] * 5
    assert isinstance(answers[5], dict)


@pytest.mark.parametrize("rest", ["[" * 100_000, "[1" + ",1" * 2000 + "]", "1" * 5000])
def test_an_event_of_another_shape_is_refused(front: Front, rest: str) -> None:
    with talking(front) as client:
        client.send('{"type": "input_audio_buffer.append", "audio": "AAAA", "x": ' + rest + "}")
        assert json.loads(client.recv(60))["code"] == "invalid_request"


def test_audio_of_all_clients_waits_at_the_gate(front: Front) -> None:
    def held() -> float:
        return front.server.metrics().get(ADMITTED, 0.0)

    wait_until(lambda: held() == 0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(talking(front)) for _ in range(3)]
        assert appended(clients[0], 15) == "passed"  # one MiB of floats each
        assert appended(clients[1], 15) == "passed"
        refused = appended(clients[2], 15)
        assert isinstance(refused, dict)
        assert refused["code"] == "deadline_exceeded"
        assert refused["retry_after_s"] > 0
        complete(clients[0])
        assert appended(clients[2], 15) == "passed"
    wait_until(lambda: held() == 0)


def test_a_client_that_leaves_releases_what_was_admitted(front: Front) -> None:
    with talking(front) as client:
        assert appended(client, 15) == "passed"
        assert front.server.metrics()[ADMITTED] == 1
    wait_until(lambda: front.server.metrics()[ADMITTED] == 0)
