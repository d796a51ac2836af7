"""Where media stand in JSON: in each API's words, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import InvalidRequest
from afferent.serve.upstream.places import find, restore
from afferent.types import Modality

IMAGE, AUDIO, VIDEO = Modality.IMAGE, Modality.AUDIO, Modality.VIDEO
URL = "http://media.example/a.png"

CASES: list[tuple[Any, list[tuple[Modality, str | None, str | None]], Any]] = [
    # OpenAI chat
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
    # Without a type, as vLLM takes it too
    ({"image_url": URL}, [(IMAGE, URL, None)], {"image_url": "R0"}),
    # Responses
    (
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        [(IMAGE, URL, None)],
        {"type": "input_image", "image_url": "R0", "detail": "auto"},
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
    # Messages
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
    ({"type": "text", "text": '{"image_url": "no"}'}, [], None),
    ({"type": "image_url", "image_url": None}, [], None),
    ({"type": "document", "source": {"type": "base64", "data": "QUJD"}}, [], None),
    ({"uuid": "a", "x": 1e99, "source": "there", "input_audio": 3}, [], None),
    ({"type": "input_image", "file_id": "file-1", "image_url": None}, [], None),
]


def found_in(part: Any) -> list[tuple[Modality, str | None, str | None]]:
    places = find(json.dumps(part).encode()).places
    return [(place.modality, place.source, place.uuid) for place in places]


@pytest.mark.parametrize(("part", "expected", "written"), CASES)
@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: {"messages": [{"content": [x]}]}, lambda x: [[x]]]
)
def test_each_apis_words(part: Any, expected: Any, written: Any, around: Any) -> None:
    body = json.dumps(around(part)).encode()
    document = find(body)
    assert [(p.modality, p.source, p.uuid) for p in document.places] == expected
    out = document.write([f"R{n}" for n in range(len(expected))])
    if written is None:
        assert out == body
    else:
        assert json.loads(out) == around(written)


def test_names_and_options_stay_where_the_engine_needs_them() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}, "uuid": "mine"}
    body = {"messages": [part], "mm_processor_kwargs": {"max_pixels": 4}, "n": 1}
    document = find(json.dumps(body).encode())
    assert document.options == {"mm_processor_kwargs": b'{"max_pixels": 4}'}
    ours = json.loads(document.write(["R0"]))
    assert ours == {"messages": [{"type": "image_url", "image_url": {"url": "R0"}}], "n": 1}
    theirs = json.loads(document.write(["R0"], names=["digest"]))
    assert theirs["messages"][0]["uuid"] == "digest"
    assert theirs["mm_processor_kwargs"] == {"max_pixels": 4}


def test_options_count_whatever_stands_in_them() -> None:
    """They are no place for media."""
    inner = {"image_url": URL, "uuid": "x"}
    document = find(json.dumps({"image_url": URL, "mm_processor_kwargs": inner}).encode())
    assert len(document.places) == 1
    assert json.loads(document.options["mm_processor_kwargs"]) == inner
    assert json.loads(document.write(["R0"])) == {"image_url": "R0"}
    assert find(b'{"mm_processor_kwargs": {"a": 1}, "prompt": "x"}').options == {}


def test_a_name_is_of_the_item_beside_it() -> None:
    """Not of one further down, nor of two."""
    inner = {"type": "image_url", "image_url": {"url": URL}}
    assert found_in({"uuid": "m", "content": [inner]}) == [(IMAGE, URL, None)]
    both = {"uuid": "m", "image_url": URL, "video_url": URL}
    assert [uuid for _, _, uuid in found_in(both)] == [None, None]
    assert "uuid" not in json.loads(find(json.dumps(both).encode()).write(["a", "b"]))


def test_keys_may_be_spelled_with_escapes() -> None:
    body = rb'{"\u0069mage_url": {"\u0075rl": "http:\/\/x"}, "uu\u0069d": "n"}'
    document = find(body)
    (place,) = document.places
    assert (place.source, place.uuid) == ("http://x", "n")
    assert json.loads(document.write(["R"])) == {"image_url": {"url": "R"}}
    source = rb'{"typ\u0065": "im\u0061ge", "source": {"type": "ur\u006c", "url": "u"}}'
    assert [place.source for place in find(source).places] == ["u"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["image_url", "video_url", "url", "uuid", "source", "type", "data", "content", "x"]
            )
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(json_values)
def test_all_else_stays(value: Any) -> None:
    """Written with what was there, it says the same; only names beside media go."""

    def without_names(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: without_names(v) for k, v in node.items() if k != "uuid"}
        return [without_names(each) for each in node] if isinstance(node, list) else node

    document = find(json.dumps(value).encode())
    urls = [place.source or "" for place in document.places]
    written = json.loads(document.write(urls))
    if all(place.source is not None for place in document.places) and not _has_sources(value):
        assert without_names(written) == without_names(value)


def _has_sources(node: Any) -> bool:
    """Sources and audio are written in another form."""
    if isinstance(node, dict):
        return "source" in node or any(map(_has_sources, node.values()))
    return isinstance(node, list) and any(map(_has_sources, node))


@pytest.mark.parametrize(
    "body",
    [
        b'{"image_url": ',
        b'{"image_url": "\\ud800x"',
        b'[{"image_url" 1}]',
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        find(body)


def test_what_was_cut_out_and_is_no_media_comes_back() -> None:
    text = b'{"a": {"data": "m:0"}, "b": "m:1"}'
    others = {"m:0": b"QUJD", "m:1": b"data:x;base64,QQ=="}
    assert restore(text, others) == b'{"a": {"data": "QUJD"}, "b": "data:x;base64,QQ=="}'
