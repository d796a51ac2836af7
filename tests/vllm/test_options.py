"""With each of vLLM's options, the answers are those of a stock vLLM with the same options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.images import encoded, photo
from tests.media.media_host import media_host, send
from tests.pages import DOCS
from tests.server import Server, data_url, image_part
from tests.vllm.options import OPTIONS, Option, chats, write_adapter
from tests.vllm.servers import SHAPES, TOOLS, Stock, supervised

PAGE = DOCS / "vllm-options.md"
_ELSEWHERE = {
    "--kv-transfer-config": "test_names.py",
    "--ec-transfer-config": "test_names.py",
    "--speculative-config": "test_modes.py",
    "--enable-chunked-prefill": "test_modes.py",
    "--max-num-batched-tokens": "test_modes.py",
    "--api-key": "test_options.py",
}
"""Files with the tests of the other rows."""


@pytest.mark.vllm
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flags.removeprefix("--"))
def test_the_answers_are_those_of_a_stock_vllm(option: Option, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    given = [each.replace("{adapter}", str(adapter)) for each in option.arguments]
    if option.flags != "--runner":
        given = [*TOOLS, *given]
    with Stock(SHAPES, "--served-model-name", "shapes", *given) as stock:
        expected = option.ask(stock.url)
    with supervised(vllm=given) as server:
        found = option.ask(server.url)
        metrics = server.metrics()
    differ = [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]
    print(f"{option.flags}: {len(found)} answers, {len(differ)} differ")
    assert not differ
    counted = {
        way: metrics[f'afferent_upstream_items_total{{modality="image",way="{way}"}}']
        for way in ("features", "bytes")
    }
    assert {way for way, number in counted.items() if number} == {option.way}


@pytest.mark.vllm
def test_media_are_fetched_by_the_list_of_afferent(tmp_path: Path) -> None:
    """``--allowed-media-domains`` is the list of a stock vLLM; ``--fetch-allow`` is ours."""
    picture = encoded(photo(90, 120), "PNG")
    given = ("--allowed-media-domains", "example.com")
    with media_host({"/a.png": send(picture)}) as host:
        named, whole = (_about(url) for url in (f"http://{host}/a.png", data_url(picture, "png")))
        with Stock(SHAPES, "--served-model-name", "shapes", *given) as stock:
            assert _text_of(stock.url, named) is None
            expected = _text_of(stock.url, whole)
        with supervised("--fetch-allow", host, vllm=given) as server:
            assert _text_of(server.url, named) == _text_of(server.url, whole) == expected
        with supervised(vllm=given) as server:
            assert _text_of(server.url, named) is None
    assert expected is not None


def _about(url: str) -> dict[str, Any]:
    content = [image_part(url), {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": "shapes", "messages": messages, "max_tokens": 24, "temperature": 0}


def _text_of(url: str, body: dict[str, Any]) -> str | None:
    """Return the text of the answer; ``None`` for a refusal."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        return None
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.vllm
def test_a_vllm_with_a_key(tmp_path: Path) -> None:
    """Afferent sends vLLM the key that it was given, and not the one of a client."""
    store_path, uds = tmp_path / "store.sock", tmp_path / "vllm.sock"
    common = ("--served-model-name", "shapes", *TOOLS)
    with Stock(SHAPES, *common) as stock:
        expected = chats(stock.url)
    front = ("--engine", "vllm", "--engine-url", f"unix:{uds}", "--store-path", str(store_path))
    place = {"AFFERENT_STORE_PATH": str(store_path)}
    with Stock(SHAPES, *common, "--api-key", "of-vllm", uds=uds, **place):
        with Server(str(SHAPES), *front, "--engine-api-key", "of-vllm") as server:
            found = chats(server.url)
            metrics = server.metrics()
        with Server(str(SHAPES), *front) as server:
            for key, status in (("of-vllm", 200), ("another", 401)):
                answer = httpx.post(
                    f"{server.url}/v1/chat/completions",
                    json=_about(data_url(encoded(photo(90, 120), "PNG"), "png")),
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=60,
                )
                assert answer.status_code == status, answer.text
    assert found == expected
    assert metrics['afferent_upstream_items_total{modality="image",way="features"}'] > 0


def test_each_tested_option_is_in_the_table_of_the_docs() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    for option in OPTIONS:
        (row,) = [line for line in rows if line.startswith(f"| `{option.flags}`")]
        assert ("media go as bytes" in row) == (option.way == "bytes")


def test_each_option_in_the_table_of_the_docs_is_tested() -> None:
    table, _, _ = PAGE.read_text(encoding="utf-8").partition("## Refused at the start")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)}
    assert named == {option.flags for option in OPTIONS} | _ELSEWHERE.keys()
    for flag, name in _ELSEWHERE.items():
        assert f'"{flag}"' in (Path(__file__).parent / name).read_text(encoding="utf-8")
