"""Whether a body that is written for an upstream is the one that came."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from afferent.media.body.cutter import BodyCutter
from afferent.media.body.received import ReceivedBody
from afferent.proxy import media_locations
from afferent.proxy.inline_body import InlineMedia
from afferent.proxy.inline_stage import Inlined
from afferent.types import Handle

PATH = "/v1/chat/completions"
FILE = bytes(range(256)) * 3
TEXT = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{TEXT}"


class Sink:
    """Destination that keeps nothing."""

    def begin(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    def end(self) -> None: ...


def is_as_received(body: bytes, *, is_features: bool = False) -> bool:
    paths = media_locations.paths_at(PATH)
    cutter = BodyCutter(
        *(Sink(), media_locations.MEDIA_KEYS),
        max_json_nbytes=1 << 20,
        max_media=9,
        is_parsed=False,
        paths=paths,
    )
    cutter.feed(body)
    cut = cutter.finish()
    received = ReceivedBody(cut.json, {}, len(body), {each.marker: each for each in cut.media})
    document = media_locations.find(cut.json, PATH, keeps_form=True)
    assert document.places
    item = InlineMedia(
        handle=Handle(segment=1, offset=0, nbytes=len(FILE), generation=1),
        start=0,
        nbytes=len(FILE),
        media_type="image/png",
        is_features=is_features,
    )
    store: Any = None
    inlined = Inlined(store, [item] * len(document.places), b"")
    return inlined.is_as_received(document, received, inlined.write(document))


def body_of(url: str = URL, /, **more: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}, **more}
    return {"model": "m", "messages": [{"role": "user", "content": [part]}]}


USUAL = json.dumps(body_of()).encode()


@pytest.mark.parametrize(
    "body",
    [
        USUAL,
        json.dumps(body_of(), indent=2).encode() + b"\n",
        USUAL.replace(b'"m"', b'"\\u006d \xc3\xa9 \\ud83d\\ude00", "t": 1.50, "n": 1e-07'),
        json.dumps({**body_of(), "metadata": {"image_url": {"url": URL}}}).encode(),
        json.dumps(body_of(detail="low")).encode(),
        json.dumps({"messages": body_of()["messages"] * 2}).encode(),
    ],
)
def test_body_that_is_written_as_it_came(body: bytes) -> None:
    assert is_as_received(body)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(body_of(uuid="mine")).encode(),
        json.dumps(body_of(URL.replace("png", "jpeg"))).encode(),
        json.dumps(body_of("https://example.org/a.png")).encode(),
        json.dumps(body_of(URL[:100] + "\r\n" + URL[100:])).encode(),
        USUAL.replace(b"image/png", b"image\\/png"),
        USUAL.replace(TEXT.encode(), TEXT.replace("/", "\\/").encode()),
        USUAL.replace(b'"messages"', b'"message\\u0073"'),
    ],
)
def test_body_that_is_written_in_another_way(body: bytes) -> None:
    assert not is_as_received(body)


def test_converted_item_is_another_one() -> None:
    assert not is_as_received(USUAL, is_features=True)


def test_marker_of_a_client_is_text() -> None:
    marker = f"afferent-media:{'0' * 32}:0"
    assert is_as_received(USUAL.replace(b'"m"', json.dumps(marker).encode()))
