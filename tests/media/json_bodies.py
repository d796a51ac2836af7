"""JSON bodies for the body cutter, in every spelling that JSON allows, and the expected result."""

from __future__ import annotations

import base64
import binascii
import random
import re
from typing import Any

import msgspec

from afferent.media.body.cutter import BodyCutter, CutBody, MediaKeys
from afferent.media.headers.media_types import is_media

URL_KEYS = ("url", "image_url", "video_url", "audio_url", "file_data")
KEYS = MediaKeys(urls=URL_KEYS, base64=("data",))
NEAR_KEYS = ("data", *URL_KEYS, "Url", "url ", "xurl", 'a"url', "ur", "urls", "", "\\", "text", "ü")


class Items:
    """A sink that stores the items."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.largest_nbytes = 0
        self._open: bytearray | None = None

    def begin(self) -> None:
        assert self._open is None
        self._open = bytearray()

    def write(self, data: bytes) -> None:
        assert self._open is not None
        assert data
        self.largest_nbytes = max(self.largest_nbytes, len(data))
        self._open += data

    def end(self) -> None:
        assert self._open is not None
        self.items.append(bytes(self._open))
        self._open = None


def cut(
    body: bytes,
    sizes: list[int] | int = 1 << 30,
    *,
    items: Items | None = None,
    keys: MediaKeys = KEYS,
    **limits: Any,
) -> tuple[CutBody, Items]:
    """Cut a body that is fed in chunks of these sizes, which are repeated."""
    items = items or Items()
    cutter = BodyCutter(items, keys, **{"max_json_nbytes": 1 << 20, "max_media": 128, **limits})
    pattern = sizes if isinstance(sizes, list) else [sizes]
    start = turn = 0
    while start < len(body):
        size = pattern[turn % len(pattern)]
        cutter.feed(memoryview(body)[start : start + size])
        start, turn = start + size, turn + 1
    return cutter.finish(), items


def media_in(key: str | None, value: str) -> bytes | None:
    """Return the media in the string under this key, by the written rules; ``None`` if it is text.

    Raises:
        binascii.Error: It is media, and malformed.
    """
    if key in URL_KEYS:
        header, comma, payload = value.partition(",")
        if (
            not comma
            or len(header) > 255
            or not re.fullmatch(r"(?i)data:[ !#-\[\]-~]*;base64", header, re.ASCII)
        ):
            return None
    elif (
        key == "data"
        and re.match(r"[A-Za-z0-9+/]{62}[A-Za-z0-9+/=]{2}", value)
        and is_media(binascii.a2b_base64(value[:64]))
    ):
        payload = value
    else:
        return None
    if not payload.isascii():
        raise binascii.Error
    if not re.fullmatch(
        r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==|[A-Za-z0-9+/]=))?", payload
    ):
        raise binascii.Error
    return base64.b64decode(payload)


def check(body: bytes, sizes: list[int] | int) -> None:
    """Cut the body, put the media back, and compare with the result of a plain parser."""
    done, items = cut(body, sizes)
    media = {item.marker: data for item, data in zip(done.media, items.items, strict=True)}
    assert [item.nbytes for item in done.media] == [len(data) for data in items.items]
    compare(msgspec.json.decode(body), msgspec.json.decode(done.json), media)
    assert not media


def compare(whole: Any, parts: Any, media: dict[str, bytes], key: str | None = None) -> None:
    if isinstance(whole, dict):
        assert list(whole) == list(parts)
        for name, value in whole.items():
            compare(value, parts[name], media, name)
    elif isinstance(whole, list):
        assert len(whole) == len(parts)
        for left, right in zip(whole, parts, strict=True):
            compare(left, right, media)
    elif isinstance(whole, str) and (data := media_in(key, whole)) is not None:
        assert media.pop(parts) == data
    else:
        assert whole == parts


def write_json(value: Any, random: random.Random, *, escapes: float = 0.1) -> bytes:
    """Write the value as JSON with random spaces and escapes."""
    space = "".join(random.choices([" ", "\n", "\t\r", ""], [1, 1, 1, 20], k=3))
    match value:
        case dict():
            pairs = [
                write_json(name, random, escapes=escapes / 4)
                + b":"
                + write_json(entry, random, escapes=escapes)
                for name, entry in value.items()
            ]
            text = b"{" + b",".join(pairs) + b"}"
        case list():
            text = b"["
            text += b",".join(write_json(entry, random, escapes=escapes) for entry in value) + b"]"
        case str():
            text = b'"' + b"".join(_write(char, random, escapes) for char in value) + b'"'
        case _:
            text = msgspec.json.encode(value)
    return space.encode() + text + space.encode()


def _write(char: str, random: random.Random, escapes: float) -> bytes:
    short = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\n": "\\n", "\t": "\\t"}
    if char in short and (char in '"\\\n\t' or random.random() < 0.5):
        if random.random() < 0.8:
            return short[char].encode()
    elif ord(char) >= 32 and random.random() >= escapes:
        return char.encode()
    units = char.encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2]) for i in range(0, len(units), 2)]
    style = random.choice(["\\u%04x", "\\u%04X"])
    return "".join(style % code for code in codes).encode()
