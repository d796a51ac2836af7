"""Questions about documents: right answers about pages, and a second request renders nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pytest

from afferent.conformance.images import DrawnImage, draw_image
from tests import pdfs
from tests.server import Server

SEEN = (("red", "circle"), ("green", "star"), ("yellow", "triangle"))


def pages(rng: np.random.Generator) -> list[DrawnImage]:
    return [draw_image(rng, colour=colour, shape=shape) for colour, shape in SEEN]


def pdf(drawn: Sequence[DrawnImage]) -> bytes:
    return pdfs.of_images([each.image for each in drawn])


def as_url(data: bytes) -> str:
    return "data:application/pdf;base64," + base64.b64encode(data).decode()


def question(number: int) -> str:
    return f"What is in picture {number}?"


def in_chat(server: Server, data: bytes, asked: str, **options: Any) -> Any:
    file = {"file_data": as_url(data), "filename": "a.pdf", **options}
    content = [{"type": "file", "file": file}, {"type": "text", "text": asked}]
    messages: Any = [{"role": "user", "content": content}]
    return server.client().chat.completions.create(model="shapes", messages=messages)


def in_responses(server: Server, asked: str, **file: Any) -> Any:
    part = {"type": "input_file", **file}
    content: Any = [part, {"type": "input_text", "text": asked}]
    given: Any = [{"role": "user", "content": content}]
    return server.client().responses.create(model="shapes", input=given)


def in_messages(server: Server, asked: str, source: dict[str, Any], **options: Any) -> str:
    block = {"type": "document", "source": source, **options}
    content: Any = [block, {"type": "text", "text": asked}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message: Any = client.messages.create(
            model="shapes", max_tokens=50, messages=[{"role": "user", "content": content}]
        )
    return str(message.content[0].text)


def rendered(server: Server) -> float:
    """Return the number of pages that were rendered."""
    return server.metrics()['afferent_document_pages_total{outcome="rendered"}']


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--file-roots", "/tmp") as running:
        yield running


def test_page_of_a_document_is_named_in_each_dialect(
    server: Server, rng: np.random.Generator
) -> None:
    data = pdf(pages(rng))
    for number, (colour, shape) in enumerate(SEEN, 1):
        expected = f"a {colour} {shape}"
        asked = question(number)
        assert in_chat(server, data, asked).choices[0].message.content == expected
        found = in_responses(server, asked, file_data=as_url(data), filename="a.pdf")
        assert found.output_text == expected
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
        assert in_messages(server, asked, source) == expected
    assert rendered(server) == len(SEEN)


def test_same_page_in_another_document_is_a_hit(server: Server, rng: np.random.Generator) -> None:
    one, two, three = pages(rng)
    before = server.metrics()
    in_chat(server, pdf([one, two]), question(1))
    in_chat(server, pdf([three, two, one]), question(1))
    in_chat(server, pdf([three, two, one]), question(3))
    after = server.metrics()

    def more(outcome: str) -> float:
        name = f'afferent_items_total{{modality="image",outcome="{outcome}"}}'
        return after[name] - before[name]

    assert (more("made"), more("hit")) == (3, 5)
    name = 'afferent_document_pages_total{outcome="rendered"}'
    assert after[name] - before[name] == 5


def test_chosen_pages_are_shown(server: Server, rng: np.random.Generator) -> None:
    data = pdf(pages(rng))
    for chosen, expected in (
        ("2-3", "a green star"),
        (3, "a yellow triangle"),
        ("1-", "a red circle"),
    ):
        said = in_chat(server, data, "What is in the picture?", pages=chosen)
        tokens = said.usage.prompt_tokens
        found = in_chat(server, data, question(1), pages=chosen).choices[0].message.content
        assert (found, tokens > 0) == (expected, True)


def test_document_by_url_with_chosen_pages(
    server: Server, rng: np.random.Generator, tmp_path: Path
) -> None:
    path = tmp_path / "without a suffix"
    path.write_bytes(pdf(pages(rng)))
    url = path.as_uri()
    found = in_responses(server, question(1), file_url=f"{url}#page=3")
    assert found.output_text == "a yellow triangle"
    assert in_messages(server, question(2), {"type": "url", "url": url}) == "a green star"


def test_conversation_about_a_document_is_continued(
    server: Server, rng: np.random.Generator
) -> None:
    data = pdf(pages(rng))
    first = in_responses(server, question(1), file_data=as_url(data), filename="a.pdf")
    client = server.client()
    then = client.responses.create(model="shapes", input=question(3), previous_response_id=first.id)
    assert (first.output_text, then.output_text) == ("a red circle", "a yellow triangle")


def test_text_of_a_document_reaches_the_model(server: Server) -> None:
    def num_tokens(text: str) -> int:
        data = pdfs.of_texts([text])
        return int(in_chat(server, data, "What is in the picture?").usage.prompt_tokens)

    assert num_tokens("a red circle and a blue star") > num_tokens("a") + 3


def test_documents_of_text_and_of_content(server: Server, rng: np.random.Generator) -> None:
    drawn = pages(rng)[0]
    encoded = base64.b64encode(drawn.encode("PNG")).decode()
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": encoded},
    }
    asked = "What is in the picture?"
    assert in_messages(server, asked, {"type": "content", "content": [image]}) == "a red circle"
    plain = {"type": "text", "media_type": "text/plain", "data": "a blue star"}
    assert in_messages(server, asked, plain, title="T", context="C", citations={"enabled": False})
    with pytest.raises(anthropic.BadRequestError, match="citations are not supported"):
        in_messages(server, asked, plain, citations={"enabled": True})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pdfs.encrypted(), "encrypted"),
        (b"%PDF-1.7 nothing", "broken"),
        (b"no pdf at all", "no PDF"),
        (pdfs.of_texts(["a"] * 101), "--max-document-pages"),
    ],
)
def test_unusable_document_gets_a_typed_error(server: Server, data: bytes, message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        in_chat(server, data, "What?")
    assert 400 <= raised.value.status_code < 500  # type: ignore[attr-defined]
    assert raised.value.code  # type: ignore[attr-defined]
