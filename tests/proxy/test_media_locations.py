"""Media are found where each API has them; everything else reaches the upstream unchanged."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import FileNotFound, InvalidRequest, MediaTooLarge, UnsupportedMedia
from afferent.files.known_files import KnownFiles
from afferent.files.stored_file import StoredFile
from afferent.items.documents import Page
from afferent.items.request import MediaPart, PageRange, SeenMedia
from afferent.media.body.cutter import BodyCutter
from afferent.proxy.media_locations import MEDIA_KEYS, TABLE, find, paths_at, restore
from afferent.types import Modality
from tests.examples import examples

IMAGE, AUDIO, VIDEO = Modality.IMAGE, Modality.AUDIO, Modality.VIDEO
URL = "http://media.example/a.png"

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def in_message(part: Any) -> Any:
    return {"messages": [{"role": "user", "content": [part]}]}


def in_input(item: Any) -> Any:
    return {"input": [item]}


Expected = list[tuple[Modality, str | None, str | None]]
PARTS: list[tuple[Any, Expected, Any]] = [
    (
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        [(IMAGE, URL, None)],
        {"type": "image_url", "image_url": {"url": "R0", "detail": "low"}},
    ),
    (
        {"type": "image_url", "image_url": {"url": URL}, "uuid": "mine"},
        [(IMAGE, URL, "mine")],
        {"type": "image_url", "image_url": {"url": "R0"}},
    ),
    (
        {"type": "image_url", "image_url": None, "uuid": "mine"},
        [(IMAGE, None, "mine")],
        {"type": "image_url", "image_url": {"url": "R0"}},
    ),
    (
        {"type": "video_url", "video_url": {"url": URL}},
        [(VIDEO, URL, None)],
        {"type": "video_url", "video_url": {"url": "R0"}},
    ),
    (
        {"type": "audio_url", "audio_url": {"url": URL}, "uuid": None},
        [(AUDIO, URL, None)],
        {"type": "audio_url", "audio_url": {"url": "R0"}},
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
        [(AUDIO, "data:audio/wav;base64,QUJD", None)],
        {"type": "audio_url", "audio_url": {"url": "R0"}},
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "afferent-media:77:0", "format": "mp3"}},
        [(AUDIO, "afferent-media:77:0", None)],
        {"type": "audio_url", "audio_url": {"url": "R0"}},
    ),
    # vLLM also accepts a part without a type
    ({"image_url": URL}, [(IMAGE, URL, None)], {"image_url": "R0"}),
    (
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        [(IMAGE, URL, None)],
        {"type": "input_image", "image_url": "R0", "detail": "auto"},
    ),
    # As in vLLM, the key decides where the type differs
    (
        {"type": "text", "image_url": URL, "uuid": "mine"},
        [(IMAGE, URL, "mine")],
        {"type": "text", "image_url": "R0"},
    ),
    # No media
    ({"type": "text", "text": '{"image_url": "no"}'}, [], None),
    ({"type": "text", "text": "a", "image_url": URL}, [], None),
    ({"type": "image_url", "image_url": None}, [], None),
    ({"uuid": "a", "x": 1e99, "source": "there", "input_audio": 3}, [], None),
    ({"type": "input_image", "file_id": "file-1", "image_url": None}, [], None),
    ({"x": {"image_url": URL}}, [], None),
    ({"type": "image", "source": {"type": "url", "url": URL}}, [], None),
]
INPUTS: list[tuple[Any, Expected, Any]] = [
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
        [(IMAGE, URL, None)],
        {"role": "user", "content": [{"type": "input_image", "image_url": "R0"}]},
    ),
    (
        {"type": "computer_call_output", "output": {"type": "screenshot", "image_url": URL}},
        [(IMAGE, URL, None)],
        {"type": "computer_call_output", "output": {"type": "screenshot", "image_url": "R0"}},
    ),
    (
        {
            "type": "function_call_output",
            "output": [{"type": "input_image", "image_url": URL}],
        },
        [(IMAGE, URL, None)],
        {
            "type": "function_call_output",
            "output": [{"type": "input_image", "image_url": "R0"}],
        },
    ),
    ({"type": "function_call", "arguments": {"image_url": URL}}, [], None),
    ({"type": "input_image", "image_url": URL}, [], None),
]
BLOCKS: list[tuple[Any, Expected, Any]] = [
    (
        {"type": "image", "source": {"type": "url", "url": URL}},
        [(IMAGE, URL, None)],
        {"type": "image", "source": {"type": "url", "url": "R0"}},
    ),
    (
        {
            "type": "tool_result",
            "content": [
                {"type": "text", "text": "x"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"},
                },
            ],
        },
        [(IMAGE, "data:image/png;base64,QUJD", None)],
        {
            "type": "tool_result",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image", "source": {"type": "url", "url": "R0"}},
            ],
        },
    ),
    # No media
    ({"type": "document", "source": {"type": "base64", "data": "QUJD"}}, [], None),
    ({"type": "tool_use", "input": {"image_url": URL, "type": "image"}}, [], None),
    (
        {"type": "tool_use", "input": {"type": "image", "source": {"type": "url", "url": URL}}},
        [],
        None,
    ),
    ({"type": "image_url", "image_url": {"url": URL}}, [], None),
]


def other_locations() -> list[tuple[str, Any, Expected, Any]]:
    """Return locations of pooling, scoring and embedding."""
    part, written = (
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": "R0"},
    )
    here: Expected = [(IMAGE, URL, None)]
    content = {"content": [part]}, {"content": [written]}
    cases: list[tuple[str, Any, Expected, Any]] = [
        ("/score", {"data_1": content[0], "x": 1}, here, {"data_1": content[1], "x": 1}),
        ("/v1/score", {"queries": [content[0]]}, here, {"queries": [content[1]]}),
        ("/rerank", {"documents": ["a", content[0]]}, here, {"documents": ["a", content[1]]}),
        ("/invocations", {"documents": [content[0]]}, here, {"documents": [content[1]]}),
        ("/invocations", {"messages": [], "documents": [content[0]]}, [], None),
        ("/v1/embeddings", in_message(part), here, in_message(written)),
        (
            "/v1/embeddings",
            {"messages": [[content[0]], [{"content": "a"}]]},
            here,
            {"messages": [[content[1]], [{"content": "a"}]]},
        ),
        ("/v1/embeddings", {"input": [content[0]]}, here, {"input": [content[1]]}),
        ("/v1/embeddings", {"input": [[content[0]]]}, here, {"input": [[content[1]]]}),
        ("/v1/embeddings", {"input": ["image_url"]}, [], None),
        ("/v2/embed", {"images": [URL]}, here, {"images": ["R0"]}),
        ("/v2/embed", {"inputs": [content[0]]}, here, {"inputs": [content[1]]}),
        (
            "/v1/systemone",
            {"images": [URL], "state": [part]},
            here,
            {"images": ["R0"], "state": [part]},
        ),
        ("/tokenize", in_message(part), here, in_message(written)),
        ("/v1/completions", {"prompt": "a", "image_url": URL}, [], None),
        ("/any/other", in_message(part), [], None),
    ]
    return cases


CASES = [
    *(
        (CHAT, in_message(part), found, written and in_message(written))
        for part, found, written in PARTS
    ),
    *(
        (RESPONSES, in_input(part), found, written and in_input(written))
        for part, found, written in INPUTS
    ),
    *(
        (MESSAGES, in_message(part), found, written and in_message(written))
        for part, found, written in BLOCKS
    ),
    *other_locations(),
]


@pytest.mark.parametrize(("path", "body", "expected", "written"), CASES)
def test_find_body_of_an_api_finds_its_media(
    path: str, body: Any, expected: Expected, written: Any
) -> None:
    text = json.dumps(body).encode()
    document = find(text, path)
    assert [(p.modality, p.source, p.uuid) for p in document.places] == expected
    out = document.write([f"R{n}" for n in range(len(expected))])
    if written is None:
        assert out == text
    else:
        assert json.loads(out) == written


def test_names_and_options_stay_where_the_engine_needs_them() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}, "uuid": "mine"}
    body = {**in_message(part), "mm_processor_kwargs": {"max_pixels": 4}, "n": 1}
    document = find(json.dumps(body).encode(), CHAT)
    assert document.options == {"mm_processor_kwargs": b'{"max_pixels": 4}'}
    ours = json.loads(document.write(["R0"]))
    assert ours == {**in_message({"type": "image_url", "image_url": {"url": "R0"}}), "n": 1}
    theirs = json.loads(document.write(["R0"], names=["digest"]))
    assert theirs["messages"][0]["content"][0]["uuid"] == "digest"
    assert theirs["mm_processor_kwargs"] == {"max_pixels": 4}


def test_options_count_whatever_stands_in_them() -> None:
    """Media inside of processor options are not media of the request."""
    inner = {"image_url": URL, "uuid": "x"}
    body = {**in_message({"image_url": URL}), "mm_processor_kwargs": inner}
    document = find(json.dumps(body).encode(), CHAT)
    assert len(document.places) == 1
    assert json.loads(document.options["mm_processor_kwargs"]) == inner
    assert json.loads(document.write(["R0"])) == in_message({"image_url": "R0"})
    assert find(b'{"mm_processor_kwargs": {"a": 1}, "prompt": "x"}', CHAT).options == {}


def test_keys_may_be_spelled_with_escapes() -> None:
    part = rb'{"\u0069mage_url": {"\u0075rl": "http:\/\/x"}, "uu\u0069d": "n"}'
    document = find(rb'{"m\u0065ssages": [{"content": [' + part + rb"]}]}", CHAT)
    (place,) = document.places
    assert (place.source, place.uuid) == ("http://x", "n")
    assert json.loads(document.write(["R"])) == {
        "messages": [{"content": [{"image_url": {"url": "R"}}]}]
    }


# Everything else


def passed_on(
    body: bytes, path: str, cuts: list[int], *, max_nbytes: int = 1 << 20, max_media: int = 64
) -> tuple[bytes, int]:
    """Return the body for the upstream, with the media put back, and the number of media."""
    kept: list[bytes] = []

    class Sink:
        def begin(self) -> None:
            kept.append(b"")

        def write(self, data: bytes) -> None:
            if len(kept[-1]) + len(data) > max_nbytes:
                raise MediaTooLarge("too large")
            kept[-1] += data

        def end(self) -> None: ...

    cutter = BodyCutter(
        Sink(),
        MEDIA_KEYS,
        max_json_nbytes=1 << 20,
        max_media=max_media,
        is_parsed=False,
        paths=paths_at(path),
    )
    bounds = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(bounds):
        cutter.feed(body[start:end])
    cut = cutter.finish()
    document = find(cut.json, path)
    shown = {place.source for place in document.places}
    others = {
        item.marker: item.written(data)
        for item, data in zip(cut.media, kept, strict=True)
        if item.marker not in shown
    }
    text = document.write([place.source or "" for place in document.places])
    return restore(text, others), len(document.places)


SOURCES = st.sampled_from(
    [
        URL,
        "data:image/png;base64,iVBORw0KGgo=",
        "data:image/png;base64,iVBORw0KGgo...",  # clients shorten media in a history like this
        "data:image/png;base64,iVBO\nRw0K",
        "A" * 80,
        "QUJD" * 30 + "!",
        "afferent:x",
    ]
)
KEYS = [
    *("image_url", "video_url", "audio_url", "input_audio", "url", "data", "uuid", "type"),
    *("source", "content", "messages", "input", "output", "*", 'a"b\\c'),
]
data_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | SOURCES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
AROUND: dict[str, list[Any]] = {
    CHAT: [
        lambda value: {"metadata": value, **in_message({"type": "text", "text": "a"})},
        lambda value: {"response_format": {"json_schema": value}, "messages": []},
        lambda value: {"tools": [{"function": {"parameters": value}}]},
        lambda value: {"chat_template_kwargs": value, "documents": [value]},
        lambda value: {"messages": [{"role": "assistant", "tool_calls": [{"function": value}]}]},
        lambda value: in_message({"type": "text", "text": "a", "x": value}),
    ],
    RESPONSES: [
        lambda value: {"input": "a", "metadata": value, "text": {"format": value}},
        lambda value: in_input({"type": "function_call", "arguments": value}),
        lambda value: {"tools": [value], "x": value},
    ],
    MESSAGES: [
        lambda value: in_message({"type": "tool_use", "id": "1", "name": "f", "input": value}),
        lambda value: {"tools": [{"input_schema": value}], "messages": []},
        lambda value: {"metadata": value, "system": [{"type": "text", "text": "a", "x": value}]},
    ],
    "/v1/completions": [lambda value: {"prompt": "a", "x": value}, lambda value: value],
}


@given(data_values, st.sampled_from(list(AROUND)), st.data(), st.booleans())
def test_data_reach_the_upstream_byte_for_byte(
    value: Any, path: str, data: st.DataObject, has_blanks: bool
) -> None:
    around = data.draw(st.sampled_from(AROUND[path]))
    separators = (", ", " : ") if has_blanks else (",", ":")
    body = json.dumps(around(value), separators=separators, ensure_ascii=False).encode()
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=4))
    assert passed_on(body, path, cuts) == (body, 0)


@given(data_values, st.lists(st.integers(0, 10_000), max_size=4))
def test_data_beside_media_stay_as_they_were(value: Any, cuts: list[int]) -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(range(200))).decode()
    body = {"metadata": value, **in_message({"type": "image_url", "image_url": {"url": url}})}
    text, num_media = passed_on(json.dumps(body, ensure_ascii=False).encode(), CHAT, cuts)
    assert num_media == 1
    written = json.loads(text)
    assert written["metadata"] == value
    assert written["messages"][0]["content"][0]["image_url"]["url"].startswith("afferent-media:")
    raw = json.dumps(value, ensure_ascii=False).encode()
    assert b'"metadata":' + raw + b"," in text


def not_media(path: str, string: bytes) -> list[bytes]:
    """Return bodies with a string under a media key, in a part that has no media."""
    if path == MESSAGES:
        source = b'{"type": "base64", "media_type": "application/pdf", "data": %s}' % string
        blocks = [
            b'{"type": "document", "source": %s}' % source,
            b'{"source": %s, "type": "document"}' % source,
            b'{"type": "text", "text": "a", "source": {"type": "url", "url": %s}}' % string,
        ]
        return [b'{"messages": [{"role": "user", "content": [%s]}]}' % block for block in blocks]
    parts = [
        b'{"type": "text", "text": "a", "image_url": %s}' % string,
        b'{"image_url": {"url": %s}, "type": "text", "text": "a"}' % string,
        b'{"type": "text", "input_audio": {"data": %s}}' % string,
    ]
    key = b"input" if path == RESPONSES else b"messages"
    return [b'{"%s": [{"role": "user", "content": [%s]}]}' % (key, part) for part in parts]


_CHARACTERS = st.sampled_from(
    [b"\\/", b"\\n", b"\\r\\n", b"\\u002f", b"\\u0041", b"\\\\", b'\\"', b"\\uD83D\\uDE00"]
    + [bytes([byte]) for byte in b"AQzR+/=, *"]
    + ["\u00e9".encode(), b"QUJD", b"QQ==", b"QR==", b"QUI=", b"QUJ="]
)
strings = st.tuples(
    st.sampled_from(
        [
            b"data:image/png;base64,",
            b"data:image\\/png;base64,",
            b"d\\u0061ta:;base64,",
            b"data:video/jpeg;base64,",
            b"A" * 62,
            b"A" * 300,
            b"A/\\/" * 30,
        ]
    ),
    st.lists(_CHARACTERS | st.binary(max_size=300).map(base64.b64encode), max_size=12),
).map(lambda found: b'"' + found[0] + b"".join(found[1]) + b'"')


@examples(400, storm=20_000)
@given(
    strings,
    st.sampled_from([CHAT, RESPONSES, MESSAGES]),
    st.integers(0, 2),
    st.lists(st.integers(0, 10_000), max_size=4),
    st.sampled_from([0, 1, 50, 1 << 20]),
    st.integers(0, 1),
)
def test_strings_at_places_of_media_that_are_none_stay_as_they_were(
    string: bytes, path: str, shape: int, cuts: list[int], max_nbytes: int, max_media: int
) -> None:
    """Malformed strings of any size and in any number stay unchanged."""
    body = not_media(path, string)[shape]
    assert passed_on(body, path, cuts, max_nbytes=max_nbytes, max_media=max_media) == (body, 0)


@pytest.mark.parametrize(
    "string",
    [
        rb'"data:image\/png;base64,iVBORw0K\nGgo="',
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + b'"',
        b'"data:image/png;base64,' + b"QUJD" * 20_000 + rb'\nQR=="',
        rb'"data:image\/png;base64,' + rb"\/\/\/\/QU" * 30_000 + b'"',
        rb'"data:image\/png;base64,' + rb"\/\/\/\/QU" * 30_000 + b'/"',
        b'"' + b"QUJD" * 20_000 + b'QR=="',
        b'"' + b"QUJD" * 20_000 + b"Q*" + b"QUJD" * 40_000 + b'"',
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_long_strings_at_places_of_media_stay_as_they_were(string: bytes, path: str) -> None:
    for body in not_media(path, string):
        for max_nbytes in (10_000, 1 << 20):
            assert passed_on(body, path, [], max_nbytes=max_nbytes) == (body, 0)
            assert passed_on(body, path, [70_000], max_nbytes=max_nbytes) == (body, 0)


def test_a_malformed_image_in_data_is_no_error() -> None:
    broken = "data:image/png;base64,####"
    body = json.dumps({"metadata": {"url": broken}}).encode()
    assert passed_on(body, CHAT, []) == (body, 0)


def test_every_path_has_places_for_strings() -> None:
    assert {path for path in TABLE if not paths_at(path)} == set()
    assert paths_at("/any/other") == frozenset()


@pytest.mark.parametrize(
    "body",
    [
        b'{"image_url": ',
        b'{"messages": [{"content": [{"image_url": "\\ud800x"}]}]}',
        b'{"messages": [{"content": [{"image_url" 1}]}]}',
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        find(body, CHAT)


def test_what_was_cut_out_and_is_no_media_comes_back() -> None:
    text = b'{"a": {"data": "m:0"}, "b": "m:1"}'
    others = {"m:0": b"QUJD", "m:1": b"data:x;base64,QQ=="}
    assert restore(text, others) == b'{"a": {"data": "QUJD"}, "b": "data:x;base64,QQ=="}'


FUNCTION = {"type": "function", "name": "look"}


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        (CHAT, {}, True),
        (CHAT, {"n": 1, "use_beam_search": False, "best_of": None}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"best_of": 3}, False),
        (CHAT, {"use_beam_search": True}, False),
        (CHAT, {"tools": [FUNCTION, {"function": {}}]}, True),
        (CHAT, {"tools": None}, True),
        (CHAT, {"tools": [FUNCTION, {"type": "web_search"}]}, False),
        (CHAT, {"tools": "malformed"}, False),
        ("/pooling", {}, False),
    ],
)
def test_prompt_that_is_processed_several_times_is_not_read_once(
    path: str, options: dict[str, Any], expected: bool
) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
    body = {"messages": [{"role": "user", "content": [part]}], **options}
    found = find(json.dumps(body).encode(), path)
    assert len(found.places) == 1
    assert found.is_read_once is expected


PDF = "data:application/pdf;base64,JVBERg=="
DOCUMENTS = [
    (CHAT, in_message({"type": "file", "file": {"file_data": PDF, "pages": "2-3", "dpi": 72}})),
    (RESPONSES, in_input({"content": [{"type": "input_file", "file_url": "http://x/a#page=2-3"}]})),
    (
        MESSAGES,
        in_message(
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="},
                "pages": "2-3",
                "title": "T",
            }
        ),
    ),
]
PAGES_OF = {
    CHAT: [
        {"type": "image_url", "image_url": {"url": "U0"}},
        {"type": "text", "text": 'a "b"'},
        {"type": "image_url", "image_url": {"url": "U1"}},
    ],
    RESPONSES: [
        {"type": "input_image", "image_url": "U0", "detail": "auto"},
        {"type": "input_text", "text": 'a "b"'},
        {"type": "input_image", "image_url": "U1", "detail": "auto"},
    ],
    MESSAGES: [
        {"type": "text", "text": "T"},
        {"type": "image", "source": {"type": "url", "url": "U0"}},
        {"type": "text", "text": 'a "b"'},
        {"type": "image", "source": {"type": "url", "url": "U1"}},
    ],
}


@pytest.mark.parametrize(("path", "body"), DOCUMENTS)
def test_pages_take_the_place_of_a_document(path: str, body: Any) -> None:
    text = json.dumps(body).encode()
    assert find(text, path).found == []
    document = find(text, path, has_documents=True)
    (place,) = document.documents
    assert (place.part.pages, document.places) == (PageRange(2, 3), [])
    assert json.loads(document.write(())) == body, "it stays until its pages are known"
    images = [MediaPart(IMAGE, SeenMedia(bytes([number]) * 32)) for number in (1, 2)]
    place.show([Page(2, images[0], 'a "b"'), Page(3, images[1], "")])
    assert document.parts({}) == tuple(images)
    written = json.loads(document.write(["U0", "U1"]))
    holder = written["input" if path == RESPONSES else "messages"][0]
    assert holder["content"] == PAGES_OF[path]


def test_images_of_pages_keep_the_form_of_their_api() -> None:
    path, body = DOCUMENTS[2]
    document = find(json.dumps(body).encode(), path, has_documents=True, keeps_form=True)
    document.documents[0].show([Page(2, MediaPart(IMAGE, SeenMedia(b"1" * 32)), "")])
    written = json.loads(document.write(["B0"], media_types=["image/png"]))
    source = {"type": "base64", "media_type": "image/png", "data": "B0"}
    assert written["messages"][0]["content"][1] == {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "tea"}, ["tea"]),
        ({"type": "content", "content": "tea"}, ["tea"]),
        ({"type": "content", "content": [{"type": "text", "text": "tea"}]}, ["tea"]),
    ],
)
def test_document_without_a_file_becomes_its_blocks(source: Any, expected: list[str]) -> None:
    body = in_message({"type": "document", "source": source, "context": "C"})
    document = find(json.dumps(body).encode(), MESSAGES, has_documents=True)
    parts = json.loads(document.write(()))["messages"][0]["content"]
    assert parts == [{"type": "text", "text": text} for text in ["C", *expected]]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "file", "file": 3},
        {"type": "input_file", "file_data": 3},
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        {"type": "document", "source": "x"},
    ],
)
def test_documents_without_bytes_reach_the_upstream_unchanged(part: Any) -> None:
    body = json.dumps(in_message(part)).encode()
    for path in (CHAT, MESSAGES):
        document = find(body, path, has_documents=True)
        assert (document.found, document.write(())) == ([], body)


def test_citations_and_wrong_pages_are_refused() -> None:
    block = {"type": "document", "source": {"type": "url", "url": "http://x/a"}}
    for more in ({"citations": {"enabled": True}}, {"pages": "3-1"}):
        body = json.dumps(in_message({**block, **more})).encode()
        with pytest.raises(InvalidRequest):
            find(body, MESSAGES, has_documents=True)


# Videos that become frames


@pytest.mark.parametrize("value", [URL, {"url": URL}])
@pytest.mark.parametrize("keeps_form", [False, True])
def test_frames_take_the_place_of_a_video(value: Any, keeps_form: bool) -> None:
    video = {"type": "video_url", "video_url": value, "uuid": "mine"}
    text = {"type": "text", "text": "?"}
    body = json.dumps({"messages": [{"role": "user", "content": [video, text]}]}).encode()
    document = find(body, CHAT, has_videos=False, keeps_form=keeps_form)
    (place,) = document.documents
    assert (place.part.source, place.part.modality) == (URL, VIDEO)
    frames = [MediaPart(IMAGE, SeenMedia(bytes([index]))) for index in (1, 2)]
    place.show([Page(number, frame, "") for number, frame in enumerate(frames, 1)])
    types = ["image/png"] * 2 if keeps_form else None
    written = json.loads(document.write(["R0", "R1"], media_types=types))
    assert written["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "R0"}},
        {"type": "image_url", "image_url": {"url": "R1"}},
        text,
    ]


@pytest.mark.parametrize("value", [None, {"url": None}, 3])
def test_video_without_a_url_stays_one(value: Any) -> None:
    video = {"type": "video_url", "video_url": value, "uuid": "mine"}
    document = find(json.dumps(in_message(video)).encode(), CHAT, has_videos=False)
    assert document.documents == []


# Stored files


def stored(id: str, media_type: str, name: str = "a") -> StoredFile:
    return StoredFile(id, name, media_type, "vision", 1, bytes(32))


PICTURE, CLIP, FILM = (
    stored("file-1", "image/png"),
    stored("file-2", "audio/mpeg"),
    stored("file-3", "application/octet-stream", "a.mp4"),
)
NOTES = stored("file-4", "text/plain")
FILES = KnownFiles({file.id: file for file in (PICTURE, CLIP, FILM, NOTES)}, has_store=True)


@pytest.mark.parametrize(
    ("part", "file", "expected"),
    [
        (
            {"type": "file", "file": {"file_id": "file-1"}, "other": 1},
            PICTURE,
            {"type": "image_url", "image_url": {"url": "R0"}, "other": 1},
        ),
        (
            {"type": "file", "file": {"file_id": "file-2", "filename": "x.png"}},
            CLIP,
            {"type": "audio_url", "audio_url": {"url": "R0"}},
        ),
        (
            {"type": "input_file", "file_id": "file-3"},
            FILM,
            {"type": "video_url", "video_url": {"url": "R0"}},
        ),
        (
            {"type": "input_file", "file_id": "file-1", "file_data": None},
            PICTURE,
            {"type": "input_image", "image_url": "R0"},
        ),
        (
            {"type": "input_image", "file_id": "file-1", "image_url": None, "detail": "low"},
            PICTURE,
            {"type": "input_image", "image_url": "R0", "detail": "low"},
        ),
    ],
)
def test_stored_file_in_a_part_becomes_an_item_of_its_kind(
    part: Any, file: StoredFile, expected: Any
) -> None:
    for path, around in ((CHAT, in_message), (RESPONSES, lambda it: in_input({"content": [it]}))):
        document = find(json.dumps(around(part)).encode(), path, files=FILES)
        (place,) = document.places
        assert (place.modality.value, place.source) == (
            "image" if file is PICTURE else "audio" if file is CLIP else "video",
            file,
        )
        (media,) = document.parts({})
        assert media.source is file
        assert json.loads(document.write(["R0"])) == around(expected)


def test_stored_video_gives_its_frames_in_the_form_of_its_part() -> None:
    for part, image in (
        ({"type": "file", "file": {"file_id": "file-3"}}, "image_url"),
        ({"type": "input_file", "file_id": "file-3"}, "input_image"),
    ):
        body = json.dumps(in_message(part)).encode()
        document = find(body, CHAT, has_videos=False, files=FILES)
        (place,) = document.documents
        assert (place.part.source, place.part.modality) == (FILM, VIDEO)
        place.show([Page(1, MediaPart(IMAGE, SeenMedia(b"1")), "")])
        (written,) = json.loads(document.write(["R0"]))["messages"][0]["content"]
        assert written["type"] == image


@pytest.mark.parametrize("kind", ["image", "document"])
def test_stored_image_in_a_block_becomes_an_image(kind: str) -> None:
    block = {"type": kind, "source": {"type": "file", "file_id": "file-1"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, block]}]}
    document = find(json.dumps(body).encode(), MESSAGES, files=FILES)
    assert [place.source for place in document.places] == [PICTURE]
    written = json.loads(document.write(["R0"]))["messages"][0]["content"][1]
    assert written == {"type": "image", "source": {"type": "url", "url": "R0"}}


def test_stored_audio_keeps_the_form_of_an_upstream_that_gets_bytes() -> None:
    body = in_message({"type": "file", "file": {"file_id": "file-2"}})
    document = find(json.dumps(body).encode(), CHAT, keeps_form=True, files=FILES)
    assert [place.is_bare for place in document.places] == [True]
    part = json.loads(document.write(["QUJD"]))["messages"][0]["content"][0]
    assert part == {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}}


UNKNOWN: list[tuple[str, Any]] = [
    (CHAT, in_message({"type": "file", "file": {"file_id": "ID"}})),
    (RESPONSES, in_input({"content": [{"type": "input_image", "file_id": "ID"}]})),
    (MESSAGES, in_message({"type": "image", "source": {"type": "file", "file_id": "ID"}})),
    (MESSAGES, in_message({"type": "document", "source": {"type": "file", "file_id": "ID"}})),
]


@pytest.mark.parametrize(("path", "body"), UNKNOWN)
def test_id_of_no_file_is_refused_and_without_a_store_passed_on(path: str, body: Any) -> None:
    text = json.dumps(body).encode()
    with pytest.raises(FileNotFound, match="'ID'"):
        find(text, path, files=FILES)
    assert find(text, path).write([]) == text
    other = text.replace(b"ID", b"file-4").replace(b'"image"', b'"document"')
    if b"input_image" not in text:
        with pytest.raises(UnsupportedMedia):
            find(other, path, files=FILES)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": "file-1"},
        {"type": "file", "file": {"file_id": 7}},
        {"type": "file"},
        {"type": "text", "text": "a", "file_id": "file-1"},
        {"type": "input_file", "file_id": None, "file_url": URL},
    ],
)
def test_part_that_names_no_file_stays(part: Any) -> None:
    text = json.dumps(in_message(part)).encode()
    document = find(text, CHAT, files=FILES)
    assert document.places == []
    assert document.write([]) == text
