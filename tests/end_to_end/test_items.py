"""Names of items from a server: by event, by lookup and in a rendered prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afferent import keys
from afferent.types import Modality
from tests import plain_http, waiting
from tests.images import encoded, photo
from tests.operations.item_reader import ItemReader
from tests.server import TINY_ENGINE, Server, data_url

pytestmark = pytest.mark.timeout(300)

RENDER, LOOKUP = "/v1/chat/completions/render", "/v1/items/lookup"
TENANTS = {name: f"key-of-{name}-{'x' * 20}" for name in ("anna", "ben")}


def image(number: int) -> bytes:
    return encoded(photo(64 + number, 48), "PNG")


def request(data: bytes) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(data, "image/png")}}
    return {"model": "shapes", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}


def send(server: Server, path: str, body: Any, tenant: str = "") -> Any:
    headers = {"authorization": f"Bearer {TENANTS[tenant]}"} if tenant else {}
    answer = plain_http.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def name_of(server: Server, data: bytes, tenant: str = "") -> str:
    found: list[str] = send(server, RENDER, request(data), tenant)["features"]["mm_hashes"]["image"]
    (name,) = found
    return name


def lookup(server: Server, *names: str, tenant: str = "") -> list[dict[str, Any]]:
    answer = send(server, LOOKUP, {"names": names}, tenant)
    assert answer["object"] == "list"
    found: list[dict[str, Any]] = answer["data"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(*TINY_ENGINE, "--item-events", f"ipc://{folder}/items") as running:
        yield running


def test_event_lookup_and_rendered_prompt_have_one_name(server: Server, folder: Path) -> None:
    data = image(1)
    name = name_of(server, data)
    assert lookup(server, name) == []  # a rendered prompt makes no features
    send(server, "/v1/chat/completions", request(data))
    (found,) = lookup(server, name, "0" * 64)
    placement = keys.placement_digest(Modality.IMAGE, data).hex()
    assert (found["name"], found["kind"], found["modality"]) == (name, "features", "image")
    assert found["placement"] == placement

    async def read() -> dict[str, Any]:
        endpoint = f"ipc://{folder}/items"
        reader = ItemReader(endpoint, f"{endpoint}.requests")
        following = asyncio.create_task(reader.follow())
        await waiting.until(lambda: following.done() or (name, "features") in reader.items)
        following.cancel()
        reader.close()
        return reader.items[name, "features"]

    assert asyncio.run(read()) == {"type": "ItemStored", **found}


def test_answer_reports_hits_and_stages_and_repeats_the_client_id(server: Server) -> None:
    asked = request(image(7))
    found = []
    for number in range(2):
        answer = plain_http.post(
            f"{server.url}/v1/chat/completions",
            json=asked,
            headers={"x-request-id": f"mine-{number}"},
            timeout=60,
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == f"mine-{number}"
        assert answer.headers["x-afferent-request-id"] == answer.json()["id"]
        stages = answer.headers["server-timing"]
        found.append((answer.headers["x-afferent-items"], "read_body;dur=" in stages))
        assert ("decode;dur=" in stages) == (number == 0)
    assert found == [("made=1", True), ("hit=1", True)]
    refused = server.post_to("/v1/chat/completions", {"model": "shapes", "messages": []})
    assert refused.status_code == 400
    assert refused.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"names": ["short"]}', 400),
        (b'{"names": [], "more": 1}', 400),
        (b'{"names": ["%s"]}' % (b"\xff" * 64), 400),
        (b'{"names": [%s""]}' % (b'"",' * 4096), 400),
        (b" " * (2 << 20), 413),
    ],
)
def test_malformed_lookup_is_refused(server: Server, body: bytes, status: int) -> None:
    answer = server.post_to(LOOKUP, body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_tenant_finds_its_own_items_alone(tmp_path: Path) -> None:
    settings = tmp_path / "afferent.toml"
    tenants = (f'{{name = "{name}", api_keys = ["{key}"]}}' for name, key in TENANTS.items())
    settings.write_text(f"tenants = [{', '.join(tenants)}]\n")
    env = {"AFFERENT_FLEET_SECRET": "s" * 32}
    with Server(*TINY_ENGINE, "--config", str(settings), env=env) as server:
        data = image(2)
        names = {tenant: name_of(server, data, tenant) for tenant in TENANTS}
        send(server, "/v1/chat/completions", request(data), "anna")
        found = {tenant: lookup(server, *names.values(), tenant=tenant) for tenant in TENANTS}
        assert [item["name"] for item in found["anna"]] == [names["anna"]]
        assert found["ben"] == []
        assert names["anna"] != names["ben"]
        assert plain_http.post(f"{server.url}{LOOKUP}", json={"names": []}).status_code == 401


def test_server_without_a_key_for_events_on_a_public_address_is_refused() -> None:
    with (
        pytest.raises(AssertionError, match="--item-events-key"),
        Server("--item-events", "tcp://0.0.0.0:5557"),
    ):
        pass
