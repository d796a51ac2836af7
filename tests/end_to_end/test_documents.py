"""Questions about documents: right answers about pages, and a second request renders nothing."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import DrawnImage, draw_image
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
from tests import pdfs
from tests.hostile_pdfs import hostile_pdfs
from tests.server import Server, wait_until

SLOW = (
    "form in itself",
    "forms that double",
    "many curves",
    "much text",
    "packed saves",
    "tiny tiles",
)
"""Attacks that take seconds of a processor."""
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
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with little time for a page and little space for media, and its store's path."""
    path = tmp_path_factory.mktemp("documents") / "store.sock"
    few = ("--raw-share", "0.06", "--max-document-pages", "500", "--max-page-s", "0.3")
    with Server("--file-roots", "/tmp", "--store-path", str(path), *few) as running:
        yield running, path


def test_page_of_a_document_is_named_in_each_dialect(
    server: Server, rng: np.random.Generator
) -> None:
    data, before = pdf(pages(rng)), rendered(server)
    for number, (colour, shape) in enumerate(SEEN, 1):
        expected = f"a {colour} {shape}"
        asked = question(number)
        assert in_chat(server, data, asked).choices[0].message.content == expected
        found = in_responses(server, asked, file_data=as_url(data), filename="a.pdf")
        assert found.output_text == expected
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
        assert in_messages(server, asked, source) == expected
    assert rendered(server) - before == len(SEEN)


def test_same_page_in_another_document_is_a_hit(server: Server, rng: np.random.Generator) -> None:
    one, two, three = pages(rng)
    before = server.metrics()
    other = pdf([three, two, one])  # each file has the time of its writing
    in_chat(server, pdf([one, two]), question(1))
    in_chat(server, other, question(1))
    in_chat(server, other, question(3))
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
    narrow: tuple[Server, Path], rng: np.random.Generator, tmp_path: Path
) -> None:
    server, _ = narrow
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


def test_a_document_stays_in_a_conversation_with_an_id(
    server: Server, rng: np.random.Generator
) -> None:
    file = {"type": "input_file", "file_data": as_url(pdf(pages(rng))), "filename": "a.pdf"}
    client = server.client()
    given: Any = [{"role": "user", "content": [file]}]
    conversation = client.conversations.create(items=given)
    answers = [
        client.responses.create(
            model="shapes", input=question(number), conversation=conversation.id
        ).output_text
        for number in (1, 3)
    ]
    assert answers == ["a red circle", "a yellow triangle"]
    listed: Any = client.conversations.items.list(conversation.id, order="asc").data[0]
    (part,) = listed.model_dump(exclude_unset=True)["content"]
    again = in_responses(server, question(3), **part)
    assert again.output_text == "a yellow triangle"


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


def pinned_nbytes(path: Path) -> int:
    with DaemonStore(str(path), name="looker") as store:
        kinds = store.stat().kinds
    return sum(kinds[kind].held_nbytes for kind in (ObjectKind.FEATURES, ObjectKind.RAW))


def test_hostile_documents_get_a_4xx_or_pages(
    narrow: tuple[Server, Path], request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    """A file costs two workers at most, and nothing of it stays."""
    server, path = narrow
    seed = int(rng.integers(1 << 30))
    print(f"seed of the files: {seed}")
    files = list(hostile_pdfs(seed, 220))
    if not request.config.getoption("--storm"):
        files = [file for file in files if file[0] not in SLOW][::6]
        files += [file for file in hostile_pdfs(seed, 220) if file[0] == "tiny tiles"]
    outcomes: Counter[str] = Counter()
    for name, data in files:
        before = len(lost_workers(server))
        content = [{"type": "file", "file": {"file_data": as_url(data), "filename": "a.pdf"}}]
        body = {"model": "shapes", "messages": [{"role": "user", "content": content}]}
        answer = server.post({**body, "max_tokens": 1})
        outcome = "ok" if answer.status_code == 200 else answer.json()["error"]["code"]
        outcomes[outcome] += 1
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (name, answer.text)
        assert len(lost_workers(server)) - before <= 2, name
    print(dict(outcomes))
    assert {"ok", "invalid_media", "unsupported_media"} <= {*outcomes}
    assert lost_workers(server), "a page that can't be interrupted has ended a worker"
    data = pdf(pages(rng))
    assert in_chat(server, data, question(2)).choices[0].message.content == "a green star"
    wait_until(lambda: pinned_nbytes(path) == 0)
    wait_until(lambda: len(server.preprocess_workers()) == 2)


def lost_workers(server: Server) -> list[str]:
    return [line for line in server.lines if "a worker has died" in line]


def test_long_document_takes_bounded_space_and_is_then_known(
    narrow: tuple[Server, Path], request: pytest.FixtureRequest
) -> None:
    """The images of all pages would not fit into the space for media at once."""
    server, path = narrow
    num_pages = 500 if request.config.getoption("--storm") else 220
    noise = np.random.default_rng(1).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    data = pdfs.of_one_image(Image.fromarray(noise), num_pages=num_pages)
    for outcome in ("made", "hit"):
        before = rendered(server)
        content = [{"type": "file", "file": {"file_data": as_url(data), "filename": "a.pdf"}}]
        body = {"model": "shapes", "messages": [{"role": "user", "content": content}]}
        answer = server.post_to("/v1/chat/completions/render?features=1", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-afferent-items"] == f"{outcome}={num_pages}"
        assert rendered(server) - before == (num_pages if outcome == "made" else 0)
    with DaemonStore(str(path), name="looker") as store:
        share_nbytes = store.stat().kinds[ObjectKind.RAW].capacity_nbytes
    assert num_pages * noise.nbytes > 1.5 * share_nbytes
    wait_until(lambda: pinned_nbytes(path) == 0)


def test_engine_computes_pages_while_others_are_rendered(
    server: Server, rng: np.random.Generator
) -> None:
    """It computes each position once, most of them before the last page exists."""
    drawn = [draw_image(rng) for _ in range(40)]
    metrics, counts = [server.metrics()], []
    file = {"type": "file", "file": {"file_data": as_url(pdf(drawn)), "filename": "a.pdf"}}
    messages: Any = [{"role": "user", "content": [file]}]
    for _ in range(2):
        answer = server.client().chat.completions.create(
            model="shapes", messages=messages, max_tokens=5
        )
        counts.append(answer.usage)
        metrics.append(server.metrics())
    before, after, _ = metrics
    computed, cached = (
        after[f"afferent_engine_{kind}_tokens_total"]
        - before[f"afferent_engine_{kind}_tokens_total"]
        for kind in ("prompt", "cached")
    )
    first, again = counts
    assert computed >= first.prompt_tokens, "more if a slow beginning is given up"
    assert cached > 0
    assert first.prompt_tokens_details.cached_tokens == 0, "it was computed for this request"
    assert again.prompt_tokens_details.cached_tokens > 0.9 * again.prompt_tokens


def test_pages_of_a_tiff_are_named(server: Server, rng: np.random.Generator) -> None:
    file = io.BytesIO()
    first, *others = (each.image for each in pages(rng))
    first.save(file, "TIFF", save_all=True, append_images=others, compression="tiff_deflate")
    url = f"data:image/tiff;base64,{base64.b64encode(file.getvalue()).decode()}"
    found = in_responses(server, question(3), file_data=url, filename="scan.tiff", pages="1-3")
    assert found.output_text == "a yellow triangle"
    source = {"type": "base64", "media_type": "image/tiff", "data": url.partition(",")[2]}
    assert in_messages(server, question(1), source, pages=2) == "a green star"
