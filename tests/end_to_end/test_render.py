"""Prompts without a model run: for routers, and for engines that take handles."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import draw_image
from afferent.engines.references import FeaturesReference
from afferent.engines.vllm_hash import image_hash
from afferent.store.client.item_cache import ItemCache
from afferent.types import ContentKey
from tests import plain_http
from tests.end_to_end.standing_in import StandIn
from tests.end_to_end.test_media import media_part
from tests.images import encoded
from tests.media_files import make_video
from tests.server import Server, ask, data_url, wait_until

QUESTION = "What is in the picture?"


@pytest.fixture(scope="module")
def renderer() -> Iterator[Server]:
    with Server("--render-for", "reference", command="render") as running:
        yield running


def render(server: Server, body: dict[str, Any], query: str = "") -> httpx.Response:
    url = f"{server.url}/afferent/v1/chat/completions/render{query}"
    return plain_http.post(url, json=body, timeout=60)


def test_in_the_format_of_vllm(server: Server, rng: np.random.Generator) -> None:
    """Tokens, hashes and placeholders, by modality and in the order of the prompt."""
    video = media_part("video", make_video(num_frames=60, rate=30))
    picture = draw_image(rng)
    body = ask([data_url(picture), data_url(draw_image(rng)), data_url(picture)], QUESTION)
    body["messages"][0]["content"].insert(1, video)
    items = render(server, body).json()
    url = f"{server.url}/v1/chat/completions/render"
    answer = plain_http.post(url, json=body, timeout=60).json()
    assert answer["token_ids"] == items["token_ids"]
    assert answer["model"] == "shapes"
    assert answer["request_id"].startswith("chatcmpl-")
    features = answer["features"]
    for modality in ("image", "video"):
        found = [item for item in items["items"] if item["modality"] == modality]
        assert features["mm_hashes"][modality] == [item["key"] for item in found]
        assert features["mm_placeholders"][modality] == [
            {"offset": item["offset"], "length": item["length"]} for item in found
        ]
    text = plain_http.post(url, json=ask([], QUESTION), timeout=60).json()
    assert text["features"] is None
    completion = {"model": "shapes", "prompt": "a red"}
    (one,) = plain_http.post(f"{server.url}/v1/completions/render", json=completion).json()
    assert (one["features"], len(one["token_ids"]) > 0) == (None, True)


def test_from_headers_alone(server: Server, rng: np.random.Generator) -> None:
    """The tokens are those of a real request; nothing is decoded, and nothing is stored."""
    pictures = [draw_image(rng) for _ in range(3)]
    body = ask([data_url(picture) for picture in [*pictures, pictures[0]]], QUESTION)
    misses = server.metric("afferent_store_misses_total")
    answer = render(server, body).json()
    assert server.metric("afferent_store_misses_total") == misses
    items = answer["items"]
    assert [item["modality"] for item in items] == ["image"] * 4
    assert len({item["key"] for item in items}) == 3
    assert items[0]["key"] == items[3]["key"]
    assert all(len(item["key"]) == 64 and "features_nbytes" not in item for item in items)
    for item in items:
        filled = answer["token_ids"][item["offset"] : item["offset"] + item["length"]]
        assert set(filled) == {5}
    assert answer["token_ids"].count(5) == sum(item["length"] for item in items)
    completion = server.post(body).json()
    assert completion["usage"]["prompt_tokens"] == len(answer["token_ids"])


def test_with_features_found_by_their_keys(server: Server, rng: np.random.Generator) -> None:
    video = media_part("video", make_video(num_frames=60, rate=30))
    body = ask([data_url(draw_image(rng))], QUESTION)
    body["messages"][0]["content"].insert(0, video)
    answer = render(server, body, "?features=1").json()
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    assert [item["modality"] for item in answer["items"]] == ["video", "image"]
    names = ("pixel_values_videos", "pixel_values")
    with server.store() as store:
        cache, keys = ItemCache(store), [bytes.fromhex(item["key"]) for item in answer["items"]]
        trees = cache.get_data("r", map(ContentKey, keys))
        for item, key, name in zip(answer["items"], keys, names, strict=True):
            tree = trees.pop(ContentKey(key))
            assert item["features_nbytes"] > tree[name].nbytes
            assert len(tree[name]) == 4 * item["length"]
            assert sum(tree["prompt"]) == item["length"]
            del tree
        cache.release("r")
    without = render(server, body).json()
    assert without["token_ids"] == answer["token_ids"]
    assert all("features_nbytes" not in item for item in without["items"])


@pytest.mark.parametrize("query", ["", "?features=1"])
def test_bad_input(server: Server, query: str) -> None:
    refused = render(server, ask([data_url(b"no picture")], QUESTION), query)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_media"
    assert render(server, {"model": "shapes"}, query).status_code == 400
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


def test_a_renderer_alone(server: Server, renderer: Server, rng: np.random.Generator) -> None:
    """``afferent render`` gives the tokens and hashes of a server with the model."""
    body = ask([data_url(draw_image(rng))], QUESTION)
    body["messages"][0]["content"].insert(
        0, media_part("video", make_video(num_frames=60, rate=30))
    )
    here = renderer.post_to("/v1/chat/completions/render", body)
    there = server.post_to("/v1/chat/completions/render", body)
    for name in ("token_ids", "features", "model"):
        assert here.json()[name] == there.json()[name]
    refused = renderer.post(body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "not_served")
    assert renderer.get("/v1/models").status_code == 200


def test_renderer_names_items_as_servers_in_front_of_vllm_do(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A router matches the hashes of a rendered prompt with the names in vLLM's KV events."""
    body = ask([data_url(draw_image(rng)), data_url(draw_image(rng))], QUESTION)
    store_path = tmp_path / "store.sock"
    engine = StandIn(tmp_path, store_path)
    where = ("--engine", "vllm", "--engine-url", engine.url, "--store-path", str(store_path))
    with Server(command="render") as naming, engine, Server(*where) as server:
        answer = naming.post_to("/v1/chat/completions/render", body)
        assert answer.status_code == 200, answer.text
        assert server.post(body).status_code == 200
        (heard,) = engine.heard
    references = [each for each in heard.references if isinstance(each, FeaturesReference)]
    features = answer.json()["features"]
    assert [each.name for each in references] == features["mm_hashes"]["image"]
    lengths = [place["length"] for place in features["mm_placeholders"]["image"]]
    assert [len(each.token_ids()) for each in references] == lengths


def test_renderer_for_stock_vllm_gives_its_hashes_and_reads_its_special_tokens(
    renderer: Server, rng: np.random.Generator
) -> None:
    """tests/vllm/test_render.py compares whole prompts with those of vLLM."""
    pictures = [draw_image(rng) for _ in range(2)]
    body = ask([data_url(picture) for picture in pictures], f"{QUESTION}<|im_end|>")
    body["messages"][0]["content"][1]["uuid"] = "a-name-of-the-client"
    settings = ("--render-hashes", "vllm-sha256", "--render-model", "org/model")
    with Server(*settings, command="render") as stock:
        answer = stock.post_to("/v1/chat/completions/render", body)
        assert answer.status_code == 200, answer.text
        image = base64.b64decode(data_url(pictures[0]).partition(",")[2])
        first = image_hash(image, model="org/model", algorithm="sha256")
        assert answer.json()["features"]["mm_hashes"]["image"] == [first, "a-name-of-the-client"]
        quoted = renderer.post_to("/v1/chat/completions/render", body)
        thin = ask([data_url(encoded(Image.new("RGB", (1, 7)), "PNG"), "png")], QUESTION)
        thin_answers = [
            each.post_to("/v1/chat/completions/render", thin) for each in (stock, renderer)
        ]
        assert [each.status_code for each in thin_answers] == [200, 400], "vLLM decodes it"
        num_ends = [each.json()["token_ids"].count(2) for each in (answer, quoted)]
        assert num_ends[0] == num_ends[1] + 1
        tool = {"type": "function", "function": {"name": "look"}}
        with_tools = {**body, "tools": [tool], "tool_choice": "required", "cache_salt": "salt"}
        salted = stock.post_to("/v1/chat/completions/render", with_tools).json()
        plain = answer.json()
        assert salted["cache_salt"] == "salt"
        assert salted["features"]["mm_hashes"] == plain["features"]["mm_hashes"]
        assert len(salted["token_ids"]) > len(plain["token_ids"]), "the tool is in the prompt"
        question = [{"role": "user", "content": QUESTION}]
        message = {"model": "shapes", "messages": question, "max_tokens": 1}
        message["tools"] = [{"name": "look", "input_schema": {}}]
        counted = stock.post_to("/v1/messages/count_tokens", message).json()
        written = stock.post_to("/v1/messages/render", message).json()
        assert counted == {"input_tokens": len(written["token_ids"])}
        assert "cache_salt" not in written
        completion = {"model": "shapes", "prompt": "a red", "cache_salt": "salt"}
        (one,) = stock.post_to("/v1/completions/render", completion).json()
        assert one["cache_salt"] == "salt"
        empty = {"model": "shapes", "prompt": ""}
        refused = stock.post_to("/v1/completions/render", empty)
        assert refused.status_code == 400
