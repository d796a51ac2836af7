"""Forms with a file: cut in pieces of any size, and written again without its bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartParser

from afferent.errors import BodyTooLarge, InvalidRequest
from afferent.media.body.form import MAX_FIELDS_NBYTES, FormCutter, FormType

BOUNDARY = b"-=b"
CONTENT_TYPE = 'multipart/form-data; boundary="-=b"'
FORM = FormType(BOUNDARY, "file")


class Sink:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def write(self, data: bytes) -> None:
        if isinstance(self.calls[-1], bytes):
            self.calls[-1] += data
        else:
            self.calls.append(bytes(data))

    def end(self) -> None:
        self.calls.append("end")


def cut(body: bytes) -> None:
    cutter = FormCutter(Sink(), FORM)
    cutter.feed(body)
    cutter.finish()


def form(*parts: tuple[str, bytes]) -> bytes:
    body = b""
    for head, data in parts:
        disposition = b"Content-Disposition: form-data; " + head.encode()
        body += b"--%b\r\n%b\r\n\r\n%b\r\n" % (BOUNDARY, disposition, data)
    return body + b"--%b--\r\n" % BOUNDARY


def read_by_starlette(body: bytes) -> list[tuple[str, Any]]:
    async def pieces() -> AsyncIterator[bytes]:
        yield body

    async def read() -> list[tuple[str, Any]]:
        found = await MultiPartParser(Headers({"content-type": CONTENT_TYPE}), pieces()).parse()
        try:
            return [
                (name, (each.filename, await each.read()) if isinstance(each, UploadFile) else each)
                for name, each in found.multi_items()
            ]
        finally:
            await found.close()

    return asyncio.run(read())


def _is_text(data: bytes) -> bool:
    try:
        return len(data.decode()) >= 0
    except UnicodeDecodeError:
        return False


datas = st.one_of(
    st.binary(max_size=300),
    st.lists(st.sampled_from([b"\r", b"\n", b"--", BOUNDARY, b"\r\n--", b"x"])).map(b"".join),
).filter(lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), datas.filter(_is_text)), max_size=3),
    datas,
    st.lists(st.integers(1, 64), min_size=1),
)
def test_form_in_pieces_of_any_size(
    fields: list[tuple[str, bytes]], file: bytes, sizes: list[int]
) -> None:
    parts = [(f'name="{name}"', data) for name, data in fields]
    body = form(*parts[:1], ('name="file"; filename="a.wav"', file), *parts[1:])
    sink = Sink()
    cutter = FormCutter(sink, FORM)
    at = 0
    while at < len(body):
        for size in sizes:
            cutter.feed(memoryview(body)[at : at + size])
            at += size
    written = cutter.finish()
    assert sink.calls == ["begin", *([file] if file else []), "end"]
    (media,) = written.media
    assert media.nbytes == len(file)
    assert written.json.count(media.marker.encode()) == 1
    whole = written.json.replace(media.marker.encode(), file)
    assert read_by_starlette(whole) == read_by_starlette(body)


def test_form_without_the_file_stays_as_it_is() -> None:
    body = form(('name="a"', b"1"), ('name="b"; filename="x"\r\nContent-Type: text/plain', b"2"))
    sink = Sink()
    cutter = FormCutter(sink, FORM)
    cutter.feed(body)
    written = cutter.finish()
    assert (sink.calls, written.media, cutter.file) == ([], [], None)
    assert written.json == re.sub(rb"Content-\w+", lambda name: name[0].lower(), body)


@pytest.mark.parametrize(
    "content_type",
    [
        *("", "application/json", "multipart/form-data", "multipart/form-data; boundary="),
        *("multipart/mixed; boundary=b", f"multipart/form-data; boundary={'b' * 257}"),
    ],
)
def test_no_form(content_type: str) -> None:
    assert FormType.of(content_type, "file") is None


FILE = ('name="file"', b"x")
WRONG: dict[str, tuple[bytes, str]] = {
    "cut": (form(FILE)[:-6], "incomplete"),
    "empty": (b"", "incomplete"),
    "no form": (b"{}", "malformed"),
    "two files": (form(FILE, FILE), "more than one file"),
    "no name": (form(("x=1", b"")), "no name"),
    "base64": (form(('name="a"\r\nContent-Transfer-Encoding: base64', b"")), "transfer-encoding"),
    "parts": (form(*[FILE, *[('name="a"', b"")] * 40]), "more than 32 parts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_form(name: str) -> None:
    body, said = WRONG[name]
    with pytest.raises(InvalidRequest, match=said):
        cut(body)


def test_bytes_that_no_part_has_are_refused() -> None:
    begun = form(FILE).removesuffix(b"--\r\n")
    cut(begun + b" " * 60_000 + b"\r\n" + form(('name="a"', b""))[len(BOUNDARY) + 4 :])
    with pytest.raises(BodyTooLarge, match="beside its file"):
        cut(begun + b" " * (MAX_FIELDS_NBYTES + 100))


def test_file_that_is_full_of_boundaries_is_refused() -> None:
    """Each of them costs the parser a hundred times as much as other bytes."""
    false = b"\r\n--" + BOUNDARY + b"x"
    cut(form(('name="file"', false * 900)))
    with pytest.raises(InvalidRequest, match="its boundary too often"):
        cut(form(('name="file"', false * 1100)))


@pytest.mark.parametrize(
    "long",
    [
        ('name="a"', b"x" * MAX_FIELDS_NBYTES),
        (f'name="a"; x="{"y" * MAX_FIELDS_NBYTES}"', b""),
    ],
    ids=["value", "header"],
)
def test_long_parts_are_refused(long: tuple[str, bytes]) -> None:
    cutter = FormCutter(Sink(), FORM)
    with pytest.raises((BodyTooLarge, InvalidRequest)):
        cutter.feed(form(long))
