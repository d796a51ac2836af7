"""The server serves a new API from its description alone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2 as httpx
import msgspec
from msgspec import Struct

from afferent.builtin.apis.api import Api, Asked, KeyHeader, Lookup, TokenCount
from afferent.builtin.apis.registry import APIS
from afferent.builtin.pipeline.call import Answer, Call
from afferent.builtin.pipeline.conversations import History
from afferent.builtin.pipeline.request import GenerateRequest, Message, Output, TextPart
from afferent.errors import AfferentError
from afferent.items.request import MediaPart
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.received import ReceivedBody
from afferent.types import Modality
from tests.builtin.frontends import frontend
from tests.images import encoded, photo


class Question(Struct, forbid_unknown_fields=True):
    text: str
    page: str


class PlainReply:
    """A reply of plain lines of text: see `Reply`."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {"said": [answer.text for answer in answers]}

    def begin(self) -> list[bytes]:
        return []

    def output(self, output: Output) -> list[bytes]:
        return []

    def finish(self) -> list[bytes]:
        return [b"data: end\n\n"]

    def fail(self, error: AfferentError) -> list[bytes]:
        return []


class PageCount:
    """An API that counts the tokens of a question about a page; the image has a key of its own."""

    name = "page_counts"
    path = "/pages/count"
    id_prefix = "page-"
    request_type = Question
    example: Mapping[str, Any] = {"text": "What?", "page": "..."}
    media_keys = MediaKeys(urls=("link",), base64=("page",))
    key_header = KeyHeader("x-page-key")
    besides: Sequence[TokenCount | Lookup] = ()

    def parse(
        self, body: ReceivedBody, *, request_id: str, model: str, refuses_unknown: bool = False
    ) -> Call:
        question = msgspec.json.decode(body.json, type=Question)
        page = MediaPart(Modality.IMAGE, body.media[question.page])
        messages = (Message("user", (page, TextPart(question.text))),)
        generate = GenerateRequest(request_id=request_id, messages=messages)
        return Call(generate, is_stream=False, reply=PlainReply())

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        return {"wrong": error.code}


async def echo(history: History, asked: Asked) -> object:
    """Return the requested id."""
    return {"id": asked.id}


class PageApi(PageCount):
    """An API for questions about a page."""

    name = "pages"
    path = "/pages"
    besides = (
        Lookup(method="GET", path="/pages/{id}", answer=echo),
        TokenCount(api=PageCount(), answer=lambda found: {"num": len(found.token_ids)}),
    )


def test_an_api_is_all_that_it_says_of_itself(address: str) -> None:
    page = base64.b64encode(encoded(photo(60, 50), "JPEG")).decode()

    async def main() -> None:
        async with frontend(address, apis=(*APIS, PageApi())) as http:
            said = await http.post("/pages", json={"text": "What?", "page": page})
            assert (said.status_code, list(said.json())) == (200, ["said"])
            assert said.headers["x-request-id"].startswith("page-")
            await check_what_stands_besides(http, page)

    asyncio.run(main())


async def check_what_stands_besides(http: httpx.AsyncClient, page: str) -> None:
    question = {"text": "What?", "page": page}
    assert (await http.get("/pages/7")).json() == {"id": "7"}
    (num,) = (await http.post("/pages/count", json=question)).json().values()
    rendered = (await http.post("/pages/render", json=question)).json()
    assert num == len(rendered["token_ids"]) > 0
    refused = await http.get("/pages")
    assert (refused.status_code, refused.json()) == (405, {"wrong": "invalid_request"})
    described = (await http.get("/openapi.json")).json()
    assert set(described["paths"]["/pages/{id}"]) == {"get"}
    (body,) = described["paths"]["/pages"]["post"]["requestBody"]["content"].values()
    assert body["schema"]["$ref"].endswith("/Question")


def test_paths_and_names_are_each_of_one_api() -> None:
    counts = [each.api for api in APIS for each in api.besides if isinstance(each, TokenCount)]
    apis: list[Api] = [*APIS, *counts]
    assert len({api.path for api in apis}) == len({api.name for api in apis}) == len(apis)
