"""Files APIs of OpenAI and Anthropic, by their official clients, and files by id in requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import psutil
import pytest

from afferent.config import Tenant
from afferent.files.file_store import FileLimits, FileStore, Quota, open_store
from tests import pdfs
from tests.builtin.frontends import frontend
from tests.images import encoded, photo

IMAGE = encoded(photo(64, 48), "PNG")
MODEL: dict[str, Any] = {"model": "shapes", "max_tokens": 1}


class Clients:
    """Official clients of one frontend."""

    def __init__(self, http: httpx.AsyncClient, store: FileStore, key: str) -> None:
        self.http, self.store = http, store
        self.openai = openai.AsyncOpenAI(
            base_url="http://frontend/v1", api_key=key, http_client=http, max_retries=0
        )
        self.anthropic = anthropic.AsyncAnthropic(
            base_url="http://frontend", api_key=key, http_client=http, max_retries=0
        )

    async def upload(self, data: bytes = IMAGE, name: str = "a.png") -> str:
        return (await self.openai.files.create(file=(name, data), purpose="vision")).id

    async def chat(self, *parts: Any) -> Any:
        message: Any = {"role": "user", "content": list(parts)}
        return await self.openai.chat.completions.create(messages=[message], **MODEL)


LIMITS = FileLimits(max_nbytes=3 << 20)


@contextlib.asynccontextmanager
async def clients(
    address: str, folder: Path, *, limits: FileLimits = LIMITS, key: str = "k" * 16, **more: Any
) -> AsyncIterator[Clients]:
    store = open_store(str(folder), limits)
    try:
        async with frontend(address, files=store, **more) as http:
            yield Clients(http, store, key)
    finally:
        store.close()


def run(
    address: str, folder: Path, test: Callable[[Clients], Awaitable[None]], **more: Any
) -> None:
    async def go() -> None:
        async with clients(address, folder, **more) as each:
            await test(each)

    asyncio.run(go())


# OpenAI's API


def test_openai_client_creates_reads_lists_and_deletes(
    store_address: str, memory_folder: Path
) -> None:
    async def test(each: Clients) -> None:
        files = each.openai.files
        made = await files.create(
            file=("ü/../my pic.png", IMAGE, "image/png"),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.bytes, made.filename, made.purpose) == (
            len(IMAGE),
            "my pic.png",
            "user_data",
        )
        assert (made.object, made.status) == ("file", "processed")
        assert made.expires_at == made.created_at + 3600
        assert await files.retrieve(made.id) == made
        content = await files.content(made.id)
        assert content.content == IMAGE
        headers = content.response.headers
        assert headers["content-type"] == "application/octet-stream"
        assert headers["content-disposition"].startswith("attachment")
        head = await each.http.head(f"/v1/files/{made.id}/content")
        assert (head.status_code, head.content) == (200, b"")
        assert [file.id async for file in await files.list()] == [made.id]
        gone = await files.delete(made.id)
        assert (gone.id, gone.deleted) == (made.id, True)
        assert [file.id async for file in await files.list()] == []

    run(store_address, memory_folder / "s", test)


@pytest.mark.parametrize("call", ["begin", "open"])
def test_client_that_leaves_while_a_file_is_opened_leaves_nothing(
    store_address: str, memory_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The file stayed open, and the bytes of an upload stayed reserved, until the server ended."""
    begun, go_on = threading.Event(), threading.Event()
    method = getattr(FileStore, call)

    def slow(self: FileStore, *args: Any, **kwargs: Any) -> Any:
        made = method(self, *args, **kwargs)
        begun.set()
        assert go_on.wait(30)
        return made

    async def test(each: Clients) -> None:
        id = await each.upload()
        files = each.openai.files
        monkeypatch.setattr(FileStore, call, slow)
        asking = asyncio.create_task(each.upload() if call == "begin" else files.content(id))
        assert await asyncio.to_thread(begun.wait, 30)
        asking.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await each.store.run(lambda: None)
        assert {path.name for path in (memory_folder / "s").rglob(".new-*")} == set()
        opened = [each.path for each in psutil.Process().open_files()]
        assert [path for path in opened if path.startswith(str(memory_folder))] == []

    run(store_address, memory_folder / "s", test)


def test_openai_list_has_pages_orders_and_purposes(store_address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        files, ids = each.openai.files, []
        for index in range(5):
            purpose: Any = "batch" if index == 2 else "vision"
            made = await files.create(file=(f"{index}", b"x"), purpose=purpose)
            ids.append(made.id)
            assert (made.expires_at is None) == (purpose != "batch")
        assert [file.id async for file in await files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in await files.list(limit=2, order="asc")] == ids
        page = await files.list(limit=2, order="asc", after=ids[0])
        assert ([file.id for file in page.data], page.has_more) == (ids[1:3], True)
        assert [file.id async for file in await files.list(purpose="batch", limit=1)] == [ids[2]]
        for wrong in ({"limit": "0"}, {"limit": "10001"}, {"order": "up"}, {"after": "x"}):
            refused = await each.http.get("/v1/files", params=wrong)
            assert refused.status_code == 400, wrong
            assert refused.json()["error"]["param"] == next(iter(wrong))

    run(store_address, memory_folder / "s", test)


@pytest.mark.parametrize("id", ["file-1", "file-" + "0" * 48, "..%2F..%2Fetc%2Fpasswd"])
def test_wrong_id_is_404_in_the_format_of_each_api(
    store_address: str, memory_folder: Path, id: str
) -> None:
    async def test(each: Clients) -> None:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            answer = await each.http.request(method, f"/v1/files/{id}{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] in ("file_not_found", "invalid_request")
            headers = {"anthropic-version": "2023-06-01"}
            answer = await each.http.request(method, f"/v1/files/{id}{path}", headers=headers)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "not_found_error"
            assert answer.json()["request_id"] == answer.headers["request-id"]
        with pytest.raises(openai.NotFoundError):
            await each.openai.files.retrieve(id)
        with pytest.raises(anthropic.NotFoundError):
            await each.anthropic.beta.files.retrieve_metadata(id)

    run(store_address, memory_folder / "s", test)


# Anthropic's API


def test_anthropic_client_uploads_reads_lists_and_deletes(
    store_address: str, memory_folder: Path
) -> None:
    async def test(each: Clients) -> None:
        files = each.anthropic.beta.files
        made = await files.upload(file=("cat.png", IMAGE, "image/png"), expires_in_seconds=3600)
        assert (made.size_bytes, made.filename, made.mime_type) == (
            len(IMAGE),
            "cat.png",
            "image/png",
        )
        assert made.expires_at is not None
        assert (made.expires_at - made.created_at).total_seconds() == 3600
        assert await files.retrieve_metadata(made.id) == made
        assert await (await files.download(made.id)).read() == IMAGE
        ids = [made.id]
        ids += [(await files.upload(file=(f"{index}.png", b"x"))).id for index in range(4)]
        ids.reverse()
        assert [file.id async for file in await files.list(limit=2)] == ids
        assert [file.id async for file in await files.list(ids=[ids[3], ids[1], "no"])] == [
            ids[1],
            ids[3],
        ]
        assert (await each.openai.files.retrieve(made.id)).bytes == len(IMAGE)
        headers = {"anthropic-version": "2023-06-01"}

        async def listed(**query: Any) -> Any:
            return (await each.http.get("/v1/files", params=query, headers=headers)).json()

        page = await listed(limit=2, after_id=ids[0])
        assert [file["id"] for file in page["data"]] == ids[1:3]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[1], ids[2], True)
        page = await listed(limit=2, before_id=ids[4])
        assert [file["id"] for file in page["data"]] == ids[2:4]
        assert page["has_more"] is True
        assert (await listed(before_id=ids[1]))["has_more"] is False
        gone = await files.delete(made.id)
        assert (gone.id, gone.type) == (made.id, "file_deleted")
        with pytest.raises(anthropic.NotFoundError):
            await files.delete(made.id)

    run(store_address, memory_folder / "s", test)


# Forms


def form(*parts: tuple[str, bytes], boundary: bytes = b"b") -> bytes:
    """Write a form; each part has its headers beside its name as text."""
    body = b""
    for head, data in parts:
        disposition = b"content-disposition: form-data; " + head.encode()
        body += b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, disposition, data)
    return body + b"--%b--\r\n" % boundary


FILE_PART = ('name="file"; filename="a.png"', IMAGE)
PURPOSE = ('name="purpose"', b"vision")
WRONG_FORMS: dict[str, bytes] = {
    "empty": b"",
    "no form": b"{}",
    "cut in the file": form(PURPOSE, FILE_PART)[:-200],
    "without its end": form(PURPOSE, FILE_PART)[:-6],
    "no file": form(PURPOSE),
    "two files": form(PURPOSE, FILE_PART, FILE_PART),
    "no purpose": form(FILE_PART),
    "wrong purpose": form(('name="purpose"', b"fun"), FILE_PART),
    "field twice": form(PURPOSE, PURPOSE, FILE_PART),
    "part without a name": form(("x=1", b""), PURPOSE, FILE_PART),
    "too many fields": form(*((f'name="f{i}"', b"") for i in range(40)), PURPOSE, FILE_PART),
    "base64": form(PURPOSE, ('name="file"\r\ncontent-transfer-encoding: base64', b"QUJD")),
    "only seconds": form(PURPOSE, ('name="expires_after[seconds]"', b"3600"), FILE_PART),
    "too short a life": form(
        PURPOSE,
        ('name="expires_after[anchor]"', b"created_at"),
        ('name="expires_after[seconds]"', b"60"),
        FILE_PART,
    ),
    "headers without end": b"--b\r\n" + b"x: y\r\n" * 1000,
    "long header": b"--b\r\nx: " + b"y" * 100_000,
}


@pytest.mark.parametrize("name", WRONG_FORMS)
def test_wrong_form_is_400_and_leaves_nothing(
    store_address: str, memory_folder: Path, name: str
) -> None:
    async def test(each: Clients) -> None:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await each.http.post("/v1/files", content=WRONG_FORMS[name], headers=headers)
        assert answer.status_code == 400, answer.text
        assert [path.name for path in (memory_folder / "s" / "_default").iterdir()] == [".lock"]

    run(store_address, memory_folder / "s", test)


def test_form_in_any_order_and_pieces_is_read(store_address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        body = form(FILE_PART, PURPOSE, ('name="other"', b"1"), boundary=b"-=b")
        for nbytes in (1, 7, 100_000):

            async def pieces(nbytes: int = nbytes) -> AsyncIterator[bytes]:
                for at in range(0, len(body), nbytes):
                    yield body[at : at + nbytes]

            headers = {"content-type": 'multipart/form-data; boundary="-=b"'}
            answer = await each.http.post("/v1/files", content=pieces(), headers=headers)
            assert answer.status_code == 200, answer.text
            assert (await each.openai.files.content(answer.json()["id"])).content == IMAGE

    run(store_address, memory_folder / "s", test)


@pytest.mark.parametrize(
    ("given", "name", "media_type"),
    [
        ('filename="../../etc/passwd"', "passwd", "application/octet-stream"),
        ('filename="a\\\\b.png"', "b.png", "image/png"),
        ('filename="C:\\x\\y.mp3"', "y.mp3", "audio/mpeg"),
        ("x=1", "unnamed", "application/octet-stream"),
        ('filename="x.png"\r\ncontent-type: text/html; a=b', "x.png", "text/html"),
        ('filename="x.png"\r\ncontent-type: <script>', "x.png", "image/png"),
        (f'filename="{"é" * 400}.gif"', "é" * 251 + ".gif", "image/gif"),
    ],
)
def test_hostile_names_become_plain_ones(
    store_address: str, memory_folder: Path, given: str, name: str, media_type: str
) -> None:
    async def test(each: Clients) -> None:
        body = form((f'name="file"; {given}', b"x"))
        headers = {"content-type": "multipart/form-data; boundary=b", "anthropic-version": "1"}
        answer = await each.http.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["filename"], answer.json()["mime_type"]) == (name, media_type)

    run(store_address, memory_folder / "s", test)


def test_file_beyond_the_limit_is_413_with_and_without_length(
    store_address: str, memory_folder: Path
) -> None:
    async def test(each: Clients) -> None:
        with pytest.raises(openai.APIStatusError) as refused:
            await each.upload(bytes((3 << 20) + 1))
        assert refused.value.status_code == 413
        body = form(PURPOSE, ('name="file"', bytes((3 << 20) + 1)))

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 1 << 18):
                yield body[at : at + (1 << 18)]

        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await each.http.post("/v1/files", content=pieces(), headers=headers)
        assert answer.status_code == 413
        assert "--files-max-nbytes" in answer.json()["error"]["message"]
        assert await each.upload(bytes(3 << 20))

    run(store_address, memory_folder / "s", test)


# Tenants


def test_tenants_have_files_and_quotas_of_their_own(
    store_address: str, memory_folder: Path
) -> None:
    tenants = [Tenant(name=name, api_keys=(name * 16,)) for name in "ab"]
    limits = FileLimits(max_nbytes=3 << 20, quota=Quota(0, 2), quotas={"b": Quota(0, 1)})

    async def test(each: Clients) -> None:
        other = Clients(each.http, each.store, "b" * 16)
        mine, theirs = await each.upload(), await other.upload()
        for client, id in ((each, theirs), (other, mine)):
            with pytest.raises(openai.NotFoundError):
                await client.openai.files.retrieve(id)
            with pytest.raises(openai.NotFoundError):
                await client.chat({"type": "file", "file": {"file_id": id}})
            assert len([file async for file in await client.openai.files.list()]) == 1
        await each.upload()
        with pytest.raises(openai.PermissionDeniedError, match="files-tenant-count"):
            await each.upload()
        with pytest.raises(anthropic.PermissionDeniedError, match="files-tenant-count"):
            await other.anthropic.beta.files.upload(file=("x", b"x"))
        stranger = Clients(each.http, each.store, "c" * 16)
        with pytest.raises(openai.AuthenticationError):
            await stranger.openai.files.list()

    run(store_address, memory_folder / "s", test, tenants=tenants, limits=limits, key="a" * 16)


# Files by id in requests


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"type": "file", "file": {"file_id": "THE-ID"}}),
    ("/v1/responses", {"type": "input_image", "file_id": "THE-ID"}),
    ("/v1/responses", {"type": "input_file", "file_id": "THE-ID"}),
    ("/v1/messages", {"type": "image", "source": {"type": "file", "file_id": "THE-ID"}}),
    ("/v1/messages", {"type": "document", "source": {"type": "file", "file_id": "THE-ID"}}),
]


def request_with(path: str, part: dict[str, Any], id: str) -> dict[str, Any]:
    key = "input" if path == "/v1/responses" else "messages"
    part = json.loads(json.dumps(part).replace("THE-ID", id))
    body: dict[str, Any] = {"model": "shapes", key: [{"role": "user", "content": [part]}]}
    return body if key == "input" else {**body, "max_tokens": 1}


def test_file_by_id_is_one_item_in_all_dialects_and_read_once(
    address: str, memory_folder: Path
) -> None:
    async def test(each: Clients) -> None:
        id = await each.upload()
        for number, (path, part) in enumerate(REQUESTS):
            answer = await each.http.post(path, json=request_with(path, part, id))
            assert answer.status_code == 200, answer.text
            expected = "hit=1" if number else "made=1"
            assert answer.headers["x-afferent-items"] == expected, path
            # A file whose features exist is not read.
            stored = memory_folder / "s" / "_default" / id
            stored.write_bytes(bytes(len(IMAGE)) + stored.read_bytes()[len(IMAGE) :])
        url = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        answer = await each.http.post(
            "/v1/chat/completions", json=request_with("/v1/chat/completions", image, "")
        )
        assert answer.headers["x-afferent-items"] == "hit=1", "it is the same item as its bytes"

    run(address, memory_folder / "s", test)


def test_official_clients_name_a_file_in_each_dialect(address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        id = await each.upload()
        await each.chat({"type": "file", "file": {"file_id": id}})
        content: Any = [{"type": "input_image", "file_id": id, "detail": "auto"}]
        await each.openai.responses.create(
            model="shapes", input=[{"role": "user", "content": content}], max_output_tokens=1
        )
        await each.anthropic.beta.messages.create(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "file", "file_id": id}}],
                }
            ],
            **MODEL,
        )

    run(address, memory_folder / "s", test)


def test_damaged_file_is_never_used(address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        id = await each.upload()
        path = memory_folder / "s" / "_default" / id
        whole = path.read_bytes()
        path.write_bytes(b"\xff" + whole[1:])
        with pytest.raises(openai.InternalServerError):
            await each.chat({"type": "file", "file": {"file_id": id}})

    run(address, memory_folder / "s", test)


@pytest.mark.parametrize(("path", "part"), REQUESTS)
def test_request_with_unknown_id_is_404_and_without_a_store_400(
    address: str, memory_folder: Path, path: str, part: dict[str, Any]
) -> None:
    body = request_with(path, part, "file-" + "0" * 48)

    async def test(each: Clients) -> None:
        answer = await each.http.post(path, json=body)
        assert answer.status_code == 404, answer.text
        assert "there is no file" in answer.json()["error"]["message"]

    run(address, memory_folder / "s", test)

    async def without() -> None:
        async with frontend(address) as http:
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert "--files-store" in answer.json()["error"]["message"]
            for method in ("GET", "POST"):
                answer = await http.request(method, "/v1/files")
                assert answer.status_code == 404
                assert "--files-store" in answer.json()["error"]["message"]

    asyncio.run(without())


def test_file_of_another_kind_is_refused(address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        id = await each.upload(b"hello", "notes.xyz")
        with pytest.raises(openai.BadRequestError, match="image, audio, a video or a PDF"):
            await each.chat({"type": "file", "file": {"file_id": id}})
        id = await each.upload(b"hello", "notes.png")
        with pytest.raises(openai.BadRequestError):
            await each.chat({"type": "file", "file": {"file_id": id}})

    run(address, memory_folder / "s", test)


def test_two_frontends_share_a_folder(store_address: str, memory_folder: Path) -> None:
    async def go() -> None:
        async with (
            clients(store_address, memory_folder / "s") as one,
            clients(store_address, memory_folder / "s") as two,
        ):
            id = await one.upload()
            assert (await two.openai.files.content(id)).content == IMAGE
            await two.openai.files.delete(id)
            with pytest.raises(openai.NotFoundError):
                await one.openai.files.retrieve(id)

    asyncio.run(go())


# Uploads in parts


def test_openai_client_uploads_in_parts(address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        uploads = each.openai.uploads
        whole = await uploads.upload_file_chunked(
            file=IMAGE,
            filename="a.png",
            bytes=len(IMAGE),
            mime_type="image/png",
            purpose="vision",
            part_size=1000,
            md5=hashlib.md5(IMAGE, usedforsecurity=False).hexdigest(),
        )
        assert whole.status == "completed"
        assert whole.file is not None
        assert (whole.file.bytes, whole.file.filename) == (len(IMAGE), "a.png")
        assert (await each.openai.files.content(whole.file.id)).content == IMAGE
        await each.chat({"type": "file", "file": {"file_id": whole.file.id}})
        again = await uploads.complete(whole.id, part_ids=["x"])
        assert again.file == whole.file, "a repeated completion finds the file"
        with pytest.raises(openai.BadRequestError, match="complete"):
            await uploads.parts.create(whole.id, data=b"x")
        with pytest.raises(openai.BadRequestError, match="complete"):
            await uploads.cancel(whole.id)
        left = {path.name for path in (memory_folder / "s" / "_default").iterdir()}
        assert left == {".lock", whole.id, whole.file.id}, "no part is left"

    run(address, memory_folder / "s", test)


def test_upload_keeps_its_rules(store_address: str, memory_folder: Path) -> None:
    async def test(each: Clients) -> None:
        uploads = each.openai.uploads
        given: Any = {"filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
        upload = await uploads.create(
            bytes=6, expires_after={"anchor": "created_at", "seconds": 7200}, **given
        )
        assert (upload.status, upload.expires_at) == ("pending", upload.created_at + 3600)
        one = (await uploads.parts.create(upload.id, data=b"def")).id
        two = (await uploads.parts.create(upload.id, data=b"abc")).id
        assert [file.id async for file in await each.openai.files.list()] == []
        for wrong in ([one], [one, one], [one, two, one], []):
            with pytest.raises(openai.BadRequestError, match="bytes"):
                await uploads.complete(upload.id, part_ids=wrong)
        with pytest.raises(openai.NotFoundError, match="no part"):
            await uploads.complete(upload.id, part_ids=[one, "part_" + "0" * 48])
        with pytest.raises(openai.BadRequestError, match="MD5"):
            await uploads.complete(upload.id, part_ids=[two, one], md5="0" * 32)
        done = await uploads.complete(upload.id, part_ids=[two, one])
        assert done.file is not None
        assert done.file.expires_at == upload.created_at + 7200
        assert (await each.openai.files.content(done.file.id)).content == b"abcdef"
        other = await uploads.create(bytes=3, **given)
        await uploads.parts.create(other.id, data=b"abc")
        assert (await uploads.cancel(other.id)).status == "cancelled"
        for call in (
            uploads.cancel(other.id),
            uploads.complete(other.id, part_ids=[]),
            uploads.parts.create(other.id, data=b"x"),
            uploads.parts.create("upload_1", data=b"x"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        for wrong in ({"bytes": -1}, {"bytes": "x"}, {"bytes": 1, "purpose": "fun"}):
            with pytest.raises(openai.BadRequestError):
                await uploads.create(**{**given, **wrong})
        with pytest.raises(openai.APIStatusError, match="files-max-nbytes"):
            await uploads.create(bytes=(3 << 20) + 1, **given)

    run(store_address, memory_folder / "s", test)


def test_uploads_belong_to_one_tenant(store_address: str, memory_folder: Path) -> None:
    tenants = [Tenant(name=name, api_keys=(name * 16,)) for name in "ab"]

    async def test(each: Clients) -> None:
        other = Clients(each.http, each.store, "b" * 16).openai.uploads
        upload = await each.openai.uploads.create(
            bytes=1, filename="a", mime_type="a/b", purpose="user_data"
        )
        for call in (
            other.parts.create(upload.id, data=b"x"),
            other.complete(upload.id, part_ids=[]),
            other.cancel(upload.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call

    run(store_address, memory_folder / "s", test, tenants=tenants, key="a" * 16)


def test_openapi_document_describes_forms_and_answers(
    store_address: str, memory_folder: Path
) -> None:
    async def test(each: Clients) -> None:
        paths = (await each.http.get("/openapi.json")).json()["paths"]
        assert set(paths["/v1/files"]) == {"get", "post"}
        assert set(paths["/v1/files/{file_id}"]) == {"get", "delete"}
        create = paths["/v1/files"]["post"]
        form = create["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["properties"]["file"] == {"type": "string", "format": "binary"}
        assert {"404", "403", "413"} <= set(create["responses"])
        content = paths["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"]
        assert content == {"application/octet-stream": {}}
        upload = paths["/v1/uploads"]["post"]["requestBody"]["content"]["application/json"]
        assert "expires_after" in upload["schema"]["properties"]
        assert "$ref" not in json.dumps(upload)

    run(store_address, memory_folder / "s", test)


def test_stored_document_is_read_page_by_page_in_each_dialect(
    address: str, memory_folder: Path
) -> None:
    async def test(each: Clients) -> None:
        id = await each.upload(pdfs.of_texts(["one", "two", "three"]), "a.pdf")
        for pages, num in (({"pages": "2"}, 1), ({"pages": "1-2"}, 2), ({}, 3)):
            for path, part in REQUESTS:
                if "image" in part["type"]:
                    continue
                inner = {"file": {**part["file"], **pages}} if "file" in part else pages
                body = request_with(path, {**part, **inner}, id)
                answer = await each.http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                items = answer.headers["x-afferent-items"].split(", ")
                assert sum(int(word.rpartition("=")[2]) for word in items) == num

    run(address, memory_folder / "s", test)
