"""Media cut out of JSON: the rest is that of a plain parser, for any body and any chunks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import random
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from afferent.errors import BodyTooLarge, InvalidMedia, InvalidRequest, TooManyItems
from afferent.media.body.cutter import BodyCutter, CutMedia, MediaKeys
from tests.callbacks import measured
from tests.examples import examples
from tests.media.json_bodies import KEYS, NEAR_KEYS, Items, check, cut, media_in, write_json

PNG = b"\x89PNG\r\n\x1a\n\0"  # a multiple of three bytes
PICTURE = PNG + bytes(range(0, 256, 5))
BASE64 = base64.b64encode(PICTURE).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"


def quoted(text: str) -> str:
    return json.dumps(text)


# Any body, in any chunks

_nasty = st.sampled_from(
    [
        '"',
        "\\",
        '\\"',
        '\\\\"',
        '"url":"data:;base64,QUJD"',
        '{"url": "',
        ";base64,",
        "data:",
        "data:image/png;base64,",
        "data:,hello",
        "afferent-media:0:0",
        "\ud7ff\ue000\U0001f600é\x00\x1f\x7f",
        "A" * 63,
        "A" * 64 + "-",
        "/" * 70,
    ]
)
_texts = st.lists(st.text(max_size=8) | _nasty, max_size=3).map("".join)
_payloads = st.binary(max_size=200).map(lambda data: base64.b64encode(data).decode())
_headers = st.sampled_from(
    ["", "image/png", "IMAGE/x-é", "audio/wav;rate=8000", "a" * 240, "a" * 241, "a" * 242, ",", '"']
)
_data_urls = st.tuples(
    st.sampled_from(["data:", "DATA:", "Data:", "date:"]),
    _headers,
    st.sampled_from([";base64,", ";BASE64,", ";base64", ","]),
    _payloads,
).map("".join)
_bare = (
    st.tuples(
        st.sampled_from([b"", PNG, b"GIF89a", b"%PDF-1"]), st.binary(min_size=40, max_size=200)
    )
    .map(b"".join)
    .map(lambda data: base64.b64encode(data).decode())
)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts | _data_urls | _bare,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NEAR_KEYS) | _texts, inner, max_size=4)
        | st.dictionaries(st.sampled_from(NEAR_KEYS[:6]), _data_urls | _bare, max_size=4)
    ),
    max_leaves=12,
)
_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def _sound(value: Any, key: str | None = None) -> Any:
    """Replace malformed media, which have a test of their own."""
    match value:
        case dict():
            return {name: _sound(entry, name) for name, entry in value.items()}
        case list():
            return [_sound(entry) for entry in value]
        case str():
            try:
                media_in(key, value)
            except binascii.Error:
                return "malformed"
    return value


@examples(150, storm=1500)
@given(_values.map(_sound), _sizes, st.integers(0, 99), st.sampled_from([0, 0.1, 1]))
def test_putting_the_media_back_gives_what_a_plain_parser_gives(
    value: Any, sizes: list[int], seed: int, escapes: float
) -> None:
    check(write_json(value, random.Random(seed), escapes=escapes), sizes)


@examples(100, storm=1000)
@given(_values, _sizes)
def test_chunks_make_no_difference(value: Any, sizes: list[int]) -> None:
    """Chunks change neither the cut media nor the refusals."""
    body = write_json(value, random.Random(0))
    assert outcome(body, sizes) == outcome(body, 1 << 30) == outcome(body, 1)


@examples(100, storm=1000)
@given(
    st.lists(
        st.binary(max_size=4)
        | st.sampled_from([b'"url"', b'"data"', b":", b'"', b"\\", b"{", b"}", b",", b"[", b" "])
        | st.sampled_from([b"data:;base64,", b"QUJD", b"QQ==", b"\\u0041", b"A" * 64]),
        max_size=30,
    ).map(b"".join),
    _sizes,
)
def test_what_is_not_json_is_not_made_json(body: bytes, sizes: list[int]) -> None:
    assert outcome(body, sizes) == outcome(body, 1 << 30)
    try:
        done, _ = cut(body, sizes)
        msgspec.json.decode(done.json)
    except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError):
        return
    msgspec.json.decode(body)


def outcome(body: bytes, sizes: list[int] | int) -> Any:
    try:
        done, items = cut(body, sizes, marker="m", max_media=3)
    except InvalidRequest as error:
        return type(error), error.message
    return done, items.items


def test_two_thousand_ways_to_cut_one_body() -> None:
    value = {
        "data": BASE64,
        "messages": [
            {"image_url": {"url": DATA_URL}, "text": 'the "url": "data:;base64,QUJD"'},
            {"url": "https://example.com/\\", "\u00fc": ["\U0001f600", "\\", '\\"']},
            {"file_data": DATA_URL, "format": "data"},
        ],
    }
    chance = random.Random(1)
    for turn in range(2000):
        body = write_json(value, chance, escapes=turn % 4 * 0.2)
        check(body, [chance.choice([1, 2, 3, 5, 7, 50, 300]) for _ in range(chance.randint(1, 30))])


def test_every_single_split() -> None:
    body = rb'{"url" : "data:image\/png;base64,QUJD\u002f\/8=","a\"url":"data:;base64,QUJD"}'
    for first in range(1, len(body)):
        done, items = cut(body, [first, len(body)], marker="m")
        assert items.items == [b"ABC\xff\xff"]
        assert done.json == rb'{"url" : "m:0","a\"url":"data:;base64,QUJD"}'
        assert done.media == [CutMedia(0, "m:0", "data:image/png;base64,", 5)]


def test_the_longest_way_to_write_a_key() -> None:
    """At any split it is recognized as this key, or as another key with the same end."""
    key = "".join(f"\\u{ord(char):04X}" for char in "image_url")
    for before, num_items in (("", 1), ("\\u0078", 0), ('\\"', 0), ("\\\\", 0)):
        body = f'{{"{before}{key}":"data:;base64,QUJD"}}'.encode()
        for first in range(1, len(body)):
            assert len(cut(body, [first, len(body)])[1].items) == num_items


# What is cut


@pytest.mark.parametrize("key", ["url", "image_url", "video_url", "audio_url", "file_data"])
def test_data_urls_are_cut_under_the_keys_of_media(key: str) -> None:
    done, items = cut(f'{{"{key}":{quoted(DATA_URL)}}}'.encode())
    assert items.items == [PICTURE]
    assert msgspec.json.decode(done.json) == {key: done.media[0].marker}
    assert done.media[0].media_type == "image/png"


@pytest.mark.parametrize("split", [1, 7, 1000])
def test_nothing_is_cut_under_other_keys_than_these(split: int) -> None:
    """The keys are configurable, and may be written with escapes."""
    keys = MediaKeys(urls=("page", "the_media"), base64=("blob",))
    body = f"""{{"url":"{DATA_URL}","data":"{BASE64}","blob":"{DATA_URL}","page":"{BASE64}",
        "list":[{{"page":"{DATA_URL}","the_\\u006dedia":"{DATA_URL}","blob":"{BASE64}"}}]}}"""
    done, items = cut(body.encode(), split, keys=keys)
    assert items.items == [PICTURE] * 3
    first, second, third = (item.marker for item in done.media)
    kept = {"url": DATA_URL, "data": BASE64, "blob": DATA_URL, "page": BASE64}
    found = [{"page": first, "the_media": second, "blob": third}]
    assert msgspec.json.decode(done.json) == {**kept, "list": found}


def test_bare_base64_is_cut_under_the_key_data() -> None:
    """OpenAI's ``input_audio`` and Anthropic's ``source`` use it, with their keys in any order."""
    for text in (f'{{"data":"{BASE64}","format":"wav"}}', f'{{"format":"wav","data":"{BASE64}"}}'):
        done, items = cut(text.encode())
        assert items.items == [PICTURE]
        assert msgspec.json.decode(done.json) == {"format": "wav", "data": done.media[0].marker}
        assert done.media[0].media_type == ""


@pytest.mark.parametrize(
    "text",
    [
        f'["{DATA_URL}"]',
        f'{{"text":"{DATA_URL}"}}',
        f'{{"data":"{DATA_URL}"}}',
        f'{{"url":["{DATA_URL}"]}}',
        f'{{"url":"{BASE64}"}}',
        f'{{"URL":"{DATA_URL}"}}',
        f'{{"my_url":"{DATA_URL}"}}',
        f'{{"a\\"url":"{DATA_URL}"}}',
        f'{{"{DATA_URL}":"url"}}',
        '{"url":"data:image/png,hello;base64,"}',
        '{"url":"data:image/png;base64"}',
        '{"url":" data:;base64,QUJD"}',
        '{"url":"see data:;base64,QUJD"}',
        '{"url":"data:\\u00e9;base64,QUJD"}',
        '{"url":"data:' + "x" * 244 + ';base64,QUJD"}',
        '{"text":"\\"url\\":\\"data:;base64,QUJD\\""}',
        '{"text":"{\\\\\\"url\\\\\\":\\\\\\"data:;base64,QUJD\\\\\\"}"}',
        '{"data":"' + "A" * 63 + '"}',
        '{"data":"' + "A" * 30 + " " + "A" * 40 + '"}',
        '{"data":"' + "-" * 80 + '"}',
        '{"data":{"data":"QUJD"},"url":null}',
        '{"url":"","data":""}',
    ],
)
def test_everything_else_stays(text: str) -> None:
    for size in (1, 1000):
        done, items = cut(text.encode(), size)
        assert done.json == text.encode()
        assert items.items == []


@pytest.mark.parametrize(
    ("text", "data", "media_type"),
    [
        ("data:image/png;base64,QUJD", b"ABC", "image/png"),
        ("DATA:image/PNG;BASE64,QUJD", b"ABC", "image/PNG"),
        ("data:;base64,QUI=", b"AB", ""),
        ("data:;base64,", b"", ""),
        ("data:audio/wav;rate=8000;base64,QQ==", b"A", "audio/wav"),
        ("data:" + "x" * 243 + ";base64,QUJD", b"ABC", "x" * 243),
        ("data:image\\/png;base64,\\/\\/\\/\\/", b"\xff\xff\xff", "image/png"),
        ("\\u0064ata:;base64\\u002cQUJ\\u0044", b"ABC", ""),
        ("data:;base64,\\u002f\\u002F\\u002b\\u002B", b"\xff\xff\xbe", ""),
        ("data:;base64,QUI\\u003d", b"AB", ""),
    ],
)
def test_ways_to_write_a_data_url(text: str, data: bytes, media_type: str) -> None:
    for key in ('"url"', '"\\u0075r\\u006C" \n', '"image\\u005Furl"\t'):
        for size in (1, 2, 1000):
            done, items = cut(f'{{{key}: "{text}" }}'.encode(), size)
            assert items.items == [data]
            (found,) = done.media
            assert (found.index, found.media_type, found.nbytes) == (0, media_type, len(data))
            assert json.loads(f'"{text}"').startswith(found.head)


def test_sixty_four_characters_decide() -> None:
    for num_zeros in (39, 38, 37):
        data = PNG + bytes(num_zeros)
        text = base64.b64encode(data).decode()
        assert len(text) == 64
        assert cut(f'{{"data":"{text}"}}'.encode())[1].items == [data]


@pytest.mark.parametrize(
    "text",
    [
        hashlib.sha256(b"").hexdigest() + "  file.txt\n",
        "/usr/lib/python3/site/packages/" + "x" * 70,
        "ACGT" * 20 + "\n" + "ACGT" * 20,
        base64.b64encode(bytes(range(200))).decode(),
        "A" * 62 + "=A" + "A" * 20,
    ],
)
def test_text_of_64_letters_is_no_media(text: str) -> None:
    """A digest, a path, or a word under the key ``data`` of a document or of a tool's input."""
    body = json.dumps({"data": text}).encode()
    for size in (1, 7, 1000):
        done, items = cut(body, size)
        assert (done.json, items.items) == (body, [])


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "JPEG2000", "PPM", "TGA"]
)
def test_files_of_all_formats_are_media(kind: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(out, kind)
    text = base64.b64encode(out.getvalue()).decode()
    assert cut(f'{{"data":"{text}"}}'.encode())[1].items == [out.getvalue()]


def test_keys_may_stand_twice() -> None:
    """A parser uses the last value; the caller notices that no part refers to the first."""
    done, items = cut(b'{"url":"data:;base64,QUJD","url":"data:;base64,QQ=="}')
    assert items.items == [b"ABC", b"A"]
    assert msgspec.json.decode(done.json) == {"url": done.media[1].marker}


def test_markers_cannot_be_guessed() -> None:
    markers = {cut(b'{"url":"data:;base64,QUJD"}')[0].media[0].marker for _ in range(3)}
    assert len(markers) == 3
    assert all(len(marker) == len("afferent-media:") + 32 + len(":0") for marker in markers)


# What is refused


@pytest.mark.parametrize(
    "payload",
    [
        "QUJ",
        "QUI",
        "QQ",
        "QQ=",
        "Q===",
        "====",
        "=QUJ",
        "QQ==QUJD",
        "QUI=QUJD",
        "QUI==",
        "QUJD=",
        "QU JD",
        "QU-_",
        "QUJ\\u00e9",
        "QUJé",
        "QU\\\\/D",
        "QU\\\\u0041D",
        'QU\\"JD',
        "QU\\qJD",
        "QUJD\\\\",
        "QUJ\\ud83d\\ude00",
        "QUJD\x00",
        "A" * 4000 + "==" + "A" * 2,
        "A" * 100_000 + "*" + "A" * 3,
    ],
)
def test_malformed_base64(payload: str) -> None:
    body = f'{{"url":"data:;base64,QUJD"}},{{"url":"data:;base64,{payload}"}}'.encode()
    for size in (1, 2, 3, 1 << 20) if len(body) < 10_000 else (4096, 1 << 20):
        items = Items()
        with pytest.raises(InvalidMedia, match=r"^the base64 of item 2 is malformed$"):
            cut(body, size, items=items)
        assert items.items == [b"ABC"]


def test_base64_whose_string_never_ends_is_no_json() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        cut(b'{"url":"data:;base64,QUJD\\"}')


@pytest.mark.parametrize("line_break", ["\\n", "\\r\\n", "\\u000a"])
@pytest.mark.parametrize("length", [4, 64, 76])
def test_base64_in_lines(line_break: str, length: int) -> None:
    """Mail encoders break lines like this; the chunks may end anywhere."""
    data = bytes(range(256)) * 3
    text = base64.b64encode(data).decode()
    lines = line_break.join(text[i : i + length] for i in range(0, len(text), length))
    body = f'{{"url":"data:;base64,{lines}{line_break}"}}'.encode()
    for size in (1, 2, 3, 5, 77, 1 << 20):
        items = Items()
        cut(body, size, items=items)
        assert items.items == [data]


def test_bodies_that_break_off() -> None:
    body = b'{"url":"data:image/png;base64,QUJDQUJD"}'
    begun = len(b'{"url":"data:image/png;base64,')
    for end in range(len(body)):
        if begun <= end <= len(body) - 2:
            with pytest.raises(InvalidRequest, match="not valid JSON"):
                cut(body[:end])
        else:
            assert not end or cut(body[:end])[0].json


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_json_is_bounded_while_it_arrives(size: int) -> None:
    text = b'{"text":"' + b"x" * 3000
    cut(text, size, max_json_nbytes=len(text))
    with pytest.raises(BodyTooLarge, match=r"more than 3008 bytes.*\(--max-json-nbytes\)"):
        cut(text, size, max_json_nbytes=len(text) - 1)


def test_media_and_markers_are_not_counted_as_json() -> None:
    text = f'{{"url":"{DATA_URL}","data":"{BASE64}"}}'
    cut(text.encode(), max_json_nbytes=len('{"url":"","data":""}'))
    with pytest.raises(BodyTooLarge):
        cut(text.encode(), max_json_nbytes=len('{"url":"","data":""}') - 1)


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"[" * 7 + b"]" * 7, 7),
        (b'{"a":' * 9 + b"1" + b"}" * 9, 9),
        (b"[[],[[]],{}]" * 1000, 3),
        (b'["[[[[", "\\"[[[", "\\\\", [], "\\\\\\"[[[{{", {"[":"["}]' * 200, 2),
        (b'["' + b"\\\\" * 5001 + b'",[[]]]', 3),
    ],
)
def test_depth_is_bounded(body: bytes, depth: int, size: int) -> None:
    cut(body, size, max_depth=depth)
    with pytest.raises(InvalidRequest, match=f"deeper than {depth - 1} levels"):
        cut(body, size, max_depth=depth - 1)


def test_the_number_of_items_is_bounded() -> None:
    body = b"[" + b",".join([b'{"url":"data:;base64,QUJD"}'] * 10_000) + b"]"
    with pytest.raises(TooManyItems, match="more than 144 items"):
        cut(body, 1000, max_media=144)
    assert len(cut(body, 1 << 16, max_media=10_000)[1].items) == 10_000


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2_000_000,
        b'{"a":' * 400_000,
        b'"' + b"\\" * 2_000_000,
        b'{"url":"' + b"\\u0064" * 400_000,
        b'{"url"' + b" " * 2_000_000,
        b'{"url":"data:' + b"x" * 2_000_000,
        b'{"data":"' + b"A" * 63 + b"\xff" * 2_000_000,
        b'{"url":"' * 300_000,
        b'"data":' * 300_000,
    ],
)
@pytest.mark.parametrize("size", [1000, 1 << 16])
def test_hostile_bodies_are_refused_early(body: bytes, size: int) -> None:
    with measured() as cost, pytest.raises(InvalidRequest):
        cut(body, size)
    assert cost.thread_s < 10 * cost.slowness


def test_escapes_in_base64_stay_cheap() -> None:
    """Each character is an escape: the body is six times as long, but needs no more memory."""
    data = PNG + bytes(749_991)
    text = "".join(f"\\u{ord(each):04x}" for each in base64.b64encode(data).decode())
    done, items = cut(f'{{"data":"{text}"}}'.encode(), 1 << 16)
    assert items.items == [data]
    assert items.largest_nbytes <= 64 << 10
    assert len(done.json) < 100


def test_little_is_held_in_memory(record_property: pytest.RecordProperty) -> None:
    class Nowhere(Items):
        def write(self, data: bytes) -> None:
            self.largest_nbytes = max(self.largest_nbytes, len(data))

    size = 64 << 10
    body = b'{"image_url":{"url":"data:image/png;base64,' + b"Zm9v" * 5_000_000 + b'"}}'
    sink = Nowhere()
    for traced in (False, True):
        cutter = BodyCutter(sink, KEYS, max_json_nbytes=1 << 20, max_media=128)
        if traced:
            tracemalloc.start()
        started = time.perf_counter()
        for start in range(0, len(body), size):
            cutter.feed(memoryview(body)[start : start + size])
        cutter.finish()
        record_property("traced_s" if traced else "s", time.perf_counter() - started)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert sink.largest_nbytes <= size


@pytest.mark.parametrize("kind", ["video/jpeg", "VIDEO/JPEG", "video/jpeg;x=y"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 16])
def test_cut_video_as_images_stays_text(kind: str, size: int) -> None:
    """Base64 images with commas between them stay as they are, except for line breaks."""
    frames = f"{BASE64},\\r\\n{BASE64},{BASE64}"
    body = f'{{"url": "data:{kind};base64,{frames}", "image_url": "{DATA_URL}"}}'
    done, items = cut(body.encode(), size)
    assert items.items == [",".join([BASE64] * 3).encode(), PICTURE]
    assert [item.is_frames for item in done.media] == [True, False]


def test_cut_video_of_another_kind_is_no_text() -> None:
    with pytest.raises(InvalidMedia):
        cut(f'{{"url": "data:video/jpeg2;base64,{BASE64},{BASE64}"}}'.encode())
